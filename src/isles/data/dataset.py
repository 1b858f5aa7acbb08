"""Samples of several sources in one global order, as batches of token ids.

B: samples in a batch. T: tokens in a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from isles.data.order import SampleOrder
from isles.data.rng import Int64Array
from isles.data.samples import SampleSource

_WINDOW = 1024


class Dataset:
    """What sample stands at which global index, and what is in it.

    Args:
        parts: the sources' samples.
        order: over as many sources of the same sizes.
        seq_length: tokens in a sample.
    """

    def __init__(self, parts: Sequence[SampleSource], order: SampleOrder, seq_length: int) -> None:
        self._parts = tuple(parts)
        self._order = order
        self.seq_length = seq_length
        nothing = np.empty(0, dtype=np.int64)
        self._window: tuple[int, Int64Array, Int64Array] = (0, nothing, nothing)

    @property
    def num_samples(self) -> int:
        """Different samples in all sources."""
        return sum(part.num_samples for part in self._parts)

    @property
    def samples_per_epoch(self) -> int:
        """Global indices that make one pass over the data."""
        return self._order.samples_per_epoch

    @property
    def vocab_size_needed(self) -> int:
        """Smallest vocabulary of a model that can read this."""
        return 1 + max(part.max_token_id for part in self._parts)

    @property
    def content(self) -> str:
        """A hash of what the samples are made of; the same where the data is."""
        return hashlib.sha256(" ".join(part.content for part in self._parts).encode()).hexdigest()

    def num_targets(self, sample_ids: Int64Array) -> int:
        """Tokens that these samples train on; reads no tokens."""
        sources, samples = self._locate(sample_ids)
        return sum(
            int(self._parts[k].num_targets(samples[sources == k]).sum()) for k in np.unique(sources)
        )

    def batch(self, sample_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The samples at these global indices, a row each.

        Returns:
            input_ids_BT and targets_BT, int64; a target is the token after its input, or
            IGNORE_INDEX at padding.
        """
        sources, samples = self._locate(sample_ids)
        input_ids_BT = np.empty((len(sample_ids), self.seq_length), dtype=np.int64)
        targets_BT = np.empty_like(input_ids_BT)
        for row, (k, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
            self._parts[k].read(sample, input_ids_BT[row], targets_BT[row])
        return input_ids_BT, targets_BT

    def _locate(self, sample_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Source and sample of each index, from a window that is located at once.

        Locating costs the same for eight indices as for a thousand, and steps ask for one small
        run of indices after another.
        """
        low, high = int(sample_ids.min()), int(sample_ids.max())
        if high - low >= _WINDOW:
            return self._order.locate(sample_ids)
        start, sources, samples = self._window
        if not start <= low <= high < start + len(sources):
            start = low
            sources, samples = self._order.locate(np.arange(start, start + 2 * _WINDOW))
            self._window = (start, sources, samples)
        return sources[sample_ids - start], samples[sample_ids - start]

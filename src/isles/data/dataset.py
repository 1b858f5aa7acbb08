"""Samples of several sources in one global order, as batches of token ids.

S: samples. B: rows of a batch. R: rows of a sample, 1, or 2 for pairs. T: places in a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from isles.data.order import SampleOrder
from isles.data.rng import Float32Array, Int64Array
from isles.data.samples import Samples

_WINDOW = 1024

_ROUND_TO = 8
"""Rows are trimmed to multiples of this, which matrix units of GPUs like."""


class Rows(NamedTuple):
    """Samples as token ids, R rows each; int64."""

    input_ids_BT: Int64Array
    """Padding is the end-of-text id."""

    targets_BT: Int64Array
    """The token after each input, or IGNORE_INDEX at padding and where nothing is trained."""

    position_ids_BT: Int64Array | None
    """0 where a document begins that attends to itself alone, and where padding does; None where
    no source keeps documents apart."""


class Dataset:
    """What sample stands at which global index, and what is in it.

    Args:
        parts: the sources' samples; all of one or all of two rows.
        order: over as many sources of the same sizes.
        seq_length: places in a row, at most.
        trims: whether the rows of a batch are only as long as the longest of them needs. Padding
            changes no loss and no gradient, so only time is saved. It must be off where every
            batch must have one shape.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        order: SampleOrder,
        seq_length: int,
        *,
        trims: bool = False,
    ) -> None:
        self.parts = tuple(parts)
        self._order = order
        self._trims = trims
        self.seq_length = seq_length
        self.rows_per_sample = self.parts[0].rows_per_sample
        """1; 2 for pairs, of which the chosen answer comes first."""
        assert {part.rows_per_sample for part in self.parts} == {self.rows_per_sample}
        self.isolates = any(part.isolates for part in self.parts)
        """Whether documents that share a row attend to themselves alone, in any source."""
        self.reference: Float32Array | None = None
        """Scores of the two answers of each pair before training, [num_samples, 2]."""
        sizes = np.array([part.num_samples for part in self.parts], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        nothing = np.empty(0, dtype=np.int64)
        self._window: tuple[int, Int64Array, Int64Array] = (0, nothing, nothing)

    @property
    def num_samples(self) -> int:
        """Different samples in all sources."""
        return sum(part.num_samples for part in self.parts)

    @property
    def samples_per_epoch(self) -> int:
        """Global indices that make one pass over the data."""
        return self._order.samples_per_epoch

    @property
    def vocab_size_needed(self) -> int:
        """Smallest vocabulary of a model that can read this."""
        return 1 + max(part.max_token_id for part in self.parts)

    @property
    def content(self) -> str:
        """A hash of what the samples are made of; the same where the data is."""
        return hashlib.sha256(" ".join(part.content for part in self.parts).encode()).hexdigest()

    def state(self) -> list[dict[str, Any] | None] | None:
        """Where streams are, as plain JSON, for a later start to go on there; None: no streams."""
        states = [part.state() for part in self.parts]
        return None if all(state is None for state in states) else states

    def close(self) -> None:
        """End what prepares samples in the background."""
        for part in self.parts:
            part.close()

    def num_targets(self, sample_ids: Int64Array) -> int:
        """Tokens that these samples train on; reads no tokens."""
        sources, samples = self._locate(sample_ids)
        return sum(
            int(self.parts[k].num_targets(samples[sources == k]).sum()) for k in np.unique(sources)
        )

    def loss_divisor(self, sample_ids: Int64Array) -> int:
        """What the summed loss of these samples is divided by: their targets, or their pairs."""
        return len(sample_ids) if self.rows_per_sample == 2 else self.num_targets(sample_ids)

    def lengths(self, sample_ids: Int64Array) -> Int64Array:
        """Places of each row up to its last target, [S, R]; reads no tokens."""
        return self._lengths(*self._locate(sample_ids))

    def width(self, longest: Int64Array) -> Int64Array:
        """Places in the rows of each batch whose longest row needs so many."""
        if not self._trims:
            return np.full_like(longest, self.seq_length)
        return np.minimum(-(-longest // _ROUND_TO) * _ROUND_TO, self.seq_length)

    def batch(self, sample_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Token ids and targets of the samples at these global indices; see `Rows`."""
        return self.rows(sample_ids)[:2]

    def rows(self, sample_ids: Int64Array) -> Rows:
        """The samples at these global indices, sample after sample."""
        return self._read(*self._locate(sample_ids))

    def numbers(self, sample_ids: Int64Array) -> Int64Array:
        """The samples at these global indices, each by its number among the different ones."""
        sources, samples = self._locate(sample_ids)
        numbers: Int64Array = self._starts[sources] + samples
        return numbers

    def numbered(self, numbers: Int64Array) -> Rows:
        """The samples of these numbers; as `rows`."""
        sources = np.searchsorted(self._ends, numbers, side="right").astype(np.int64)
        return self._read(sources, numbers - self._starts[sources])

    def _read(self, sources: Int64Array, samples: Int64Array) -> Rows:
        each = self.rows_per_sample
        width = self.seq_length
        if self._trims:
            width = int(self.width(self._lengths(sources, samples).max()))
        shape = (len(sources) * each, width)
        input_ids_BT, targets_BT = (np.empty(shape, dtype=np.int64) for _ in range(2))
        position_ids_BT = np.tile(np.arange(shape[1]), (shape[0], 1)) if self.isolates else None
        for index, (k, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
            rows = slice(index * each, (index + 1) * each)
            positions_RT = None if position_ids_BT is None else position_ids_BT[rows]
            self.parts[k].read(sample, input_ids_BT[rows], targets_BT[rows], positions_RT)
        return Rows(input_ids_BT, targets_BT, position_ids_BT)

    def _lengths(self, sources: Int64Array, samples: Int64Array) -> Int64Array:
        lengths = np.empty((len(sources), self.rows_per_sample), dtype=np.int64)
        for k in np.unique(sources):
            here = sources == k
            lengths[here] = self.parts[k].lengths(samples[here])
        return lengths

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

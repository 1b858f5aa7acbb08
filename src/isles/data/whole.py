"""Samples of whole documents, packed or one a row, and pairs of them.

T: places in a row. R: rows of a sample, 1, or 2 for pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from isles.data.packing import best_fit
from isles.data.rng import Int64Array
from isles.data.samples import begin_anew
from isles.data.sources.counts import SampleCounts
from isles.data.tokens.split import Ranges
from isles.data.tokens.store import TokenStore
from isles.dist.batch import IGNORE_INDEX

BoolArray = npt.NDArray[np.bool_]
TooLong = Literal["truncate", "drop"]

_DOCUMENTS_AT_ONCE = 4096
"""Documents whose trained tokens are counted at once, so that memory stays small."""


class WholeSamples:
    """Whole documents, as many as fit a sample, or one each.

    A document's last token is no input, so n tokens take n-1 places, each with its target. One
    that needs more places than a sample has loses its end, or is left out; one without a trained
    token is left out. Documents that share a sample stand in the order of the source.

    Args:
        store: the tokens.
        ranges: the documents that are used, whole.
        seq_length: places in a sample.
        packs: whether documents share samples.
        isolates: whether those that do attend to themselves alone.
        too_long: what becomes of long ones.
    """

    rows_per_sample = 1

    def __init__(
        self,
        store: TokenStore,
        ranges: Ranges,
        seq_length: int,
        *,
        packs: bool,
        isolates: bool,
        too_long: TooLong,
    ) -> None:
        self.isolates = packs and isolates
        self._store = store
        self._seq_length = seq_length
        kept = _fit(store, ranges, seq_length, 1, too_long)
        lengths = kept.ends - kept.starts - 1
        if packs:
            order, self._sample_ends = best_fit(lengths, seq_length)
        else:
            order = np.arange(len(lengths))
            self._sample_ends = np.arange(1, len(lengths) + 1)
        self._starts, self._ends = kept.starts[order], kept.ends[order]
        # The sums up to each sample: a sample's own are differences.
        self._used = _cumulated(lengths[order], self._sample_ends)
        self._targets = _cumulated(kept.targets[order], self._sample_ends)
        self._kept = kept
        how = f"{'packed' if packs else 'single'}:{'isolated' if self.isolates else 'joined'}"
        self._how = f"{how}:{seq_length}:{too_long}"

    @property
    def num_samples(self) -> int:
        """What the documents fill."""
        return len(self._sample_ends)

    @property
    def max_token_id(self) -> int:
        """No id is larger."""
        return self._store.max_token_id

    @property
    def content(self) -> str:
        """The hash of the tokens, and how they became samples."""
        return f"{self._store.digest}:{self.num_samples}:{self._how}"

    @property
    def counts(self) -> SampleCounts:
        """See SampleSource."""
        used = int(self._used[-1])
        return self._kept.counts(self.num_samples, used, self.num_samples * self._seq_length)

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """See SampleSource."""
        return self._targets[samples + 1] - self._targets[samples]

    def lengths(self, samples: Int64Array) -> Int64Array:
        """See SampleSource."""
        return (self._used[samples + 1] - self._used[samples])[:, None]

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        """See SampleSource."""
        first = int(self._sample_ends[sample - 1]) if sample else 0
        borders, place = [], 0
        for document in range(first, int(self._sample_ends[sample])):
            start, end = int(self._starts[document]), int(self._ends[document])
            _write(self._store, start, end, place, input_ids_RT[0], targets_RT[0])
            borders.append(place)
            place += end - start - 1
        input_ids_RT[0, place:] = self._store.end_of_text_id
        targets_RT[0, place:] = IGNORE_INDEX
        if self.isolates and position_ids_RT is not None:
            begin_anew(position_ids_RT[0], [*borders, place])


class PairSamples:
    """Two answers to one prompt: the chosen one in the first row, the rejected one in the second.

    Pairs are not packed. One with a document of more places than a row has loses that document's
    end, or is left out; one with a document without a trained token is left out.

    Args:
        store: the tokens; documents come in pairs.
        ranges: the documents that are used, whole pairs.
        seq_length: places in a row.
        too_long: what becomes of long ones.
    """

    rows_per_sample = 2
    isolates = False

    def __init__(
        self, store: TokenStore, ranges: Ranges, seq_length: int, *, too_long: TooLong
    ) -> None:
        self._store = store
        self._seq_length = seq_length
        self._too_long = too_long
        self._kept = _fit(store, ranges, seq_length, 2, too_long)
        self._lengths = (self._kept.ends - self._kept.starts - 1).reshape(-1, 2)

    @property
    def num_samples(self) -> int:
        """Pairs."""
        return len(self._lengths)

    @property
    def max_token_id(self) -> int:
        """No id is larger."""
        return self._store.max_token_id

    @property
    def content(self) -> str:
        """The hash of the tokens, and how they became pairs."""
        how = f"pairs:{self._seq_length}:{self._too_long}"
        return f"{self._store.digest}:{self.num_samples}:{how}"

    @property
    def counts(self) -> SampleCounts:
        """See SampleSource."""
        places = 2 * self.num_samples * self._seq_length
        return self._kept.counts(self.num_samples, int(self._lengths.sum()), places)

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """See SampleSource: of both rows."""
        both: Int64Array = self._kept.targets.reshape(-1, 2)[samples].sum(1)
        return both

    def lengths(self, samples: Int64Array) -> Int64Array:
        """See SampleSource."""
        return self._lengths[samples]

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        """See SampleSource."""
        del position_ids_RT  # one document a row, from 0 on
        for row in range(2):
            document = 2 * sample + row
            start, end = int(self._kept.starts[document]), int(self._kept.ends[document])
            _write(self._store, start, end, 0, input_ids_RT[row], targets_RT[row])
            input_ids_RT[row, end - start - 1 :] = self._store.end_of_text_id
            targets_RT[row, end - start - 1 :] = IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class _Kept:
    """The documents that are left, cut to their length.

    Args:
        starts, ends: their tokens in the store.
        targets: trained tokens of each.
        units: documents, or pairs, that there were.
        truncated, too_long, untrained: as in SampleCounts.
    """

    starts: Int64Array
    ends: Int64Array
    targets: Int64Array
    units: int
    truncated: int
    too_long: int
    untrained: int

    def counts(self, samples: int, used: int, places: int) -> SampleCounts:
        """With what the samples hold."""
        return SampleCounts(
            self.units, self.truncated, self.too_long, self.untrained, samples, used, places
        )


def _fit(store: TokenStore, ranges: Ranges, seq_length: int, each: int, too_long: TooLong) -> _Kept:
    """Cut documents to seq_length + 1 tokens, and leave out what cannot be used, `each` at once."""
    starts = np.asarray(ranges.starts, dtype=np.int64)
    given = np.asarray(ranges.ends, dtype=np.int64)
    assert len(starts) % each == 0, "pairs are not split"
    ends = np.minimum(given, starts + seq_length + 1)
    is_long: BoolArray = np.logical_or.reduce((given > ends).reshape(-1, each), axis=1)
    targets = _count_trained(store, starts, ends)
    is_trained: BoolArray = np.logical_and.reduce((targets > 0).reshape(-1, each), axis=1)
    fits = np.logical_not(is_long & (too_long == "drop"))
    kept = fits & is_trained
    by_document = np.repeat(kept, each)
    return _Kept(
        starts=starts[by_document],
        ends=ends[by_document],
        targets=targets[by_document],
        units=len(is_long),
        truncated=int((is_long & kept).sum()),
        too_long=int((~fits).sum()),
        untrained=int((fits & ~is_trained).sum()),
    )


def _count_trained(store: TokenStore, starts: Int64Array, ends: Int64Array) -> Int64Array:
    """Trained tokens of each document; the first token of one is never predicted."""
    counts: Int64Array = np.maximum(ends - starts - 1, 0)
    if store.trained is None:
        return counts
    long_enough = np.flatnonzero(counts)
    for first in range(0, len(long_enough), _DOCUMENTS_AT_ONCE):
        documents = long_enough[first : first + _DOCUMENTS_AT_ONCE]
        low, high = int(starts[documents].min()), int(ends[documents].max())
        # One more, as a border may lie behind the last token.
        trained = np.zeros(high - low + 1, dtype=np.int32)
        trained[:-1] = store.trained[low:high]
        borders = np.stack([starts[documents] + 1, ends[documents]], 1).ravel() - low
        counts[documents] = np.add.reduceat(trained, borders)[::2]
    return counts


def _cumulated(per_document: Int64Array, sample_ends: Int64Array) -> Int64Array:
    """Sums over the documents of all samples before each sample, and over all."""
    sums = np.concatenate([[0], np.cumsum(per_document)])
    return np.asarray(sums[np.concatenate([[0], sample_ends])], dtype=np.int64)


def _write(
    store: TokenStore,
    start: int,
    end: int,
    place: int,
    input_ids_T: Int64Array,
    targets_T: Int64Array,
) -> None:
    """Write one document's tokens from this place of a row on."""
    here = slice(place, place + end - start - 1)
    input_ids_T[here] = store.tokens[start : end - 1]
    targets_T[here] = store.tokens[start + 1 : end]
    if store.trained is not None:
        targets_T[here][~store.trained[start + 1 : end].astype(np.bool_)] = IGNORE_INDEX

"""Builders of sample tables, which assign a store's tokens to samples.

`split_store` holds some documents out for validation. `packed` and `cut` are for text, `whole` for
documents that stay whole, `pairs` for preferences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from isles.config.sections.data import DataConfig, SourceConfig
from isles.config.sections.data import isolates as isolates_documents
from isles.data.order import Int64Array, draw, key_from
from isles.data.samples import SampleCounts, SampleTable
from isles.data.tokens.store import TokenStore

TooLong = Literal["truncate", "drop"]

_DOCUMENTS_AT_ONCE = 4096
"""Number of documents whose trained tokens are counted together, to limit memory."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Disjoint pieces of a store's tokens, in order. A piece is a document or a part of one."""

    starts: Int64Array
    ends: Int64Array

    @classmethod
    def of(cls, store: TokenStore) -> Ranges:
        """All documents of a store."""
        ends = np.asarray(store.document_ends)
        return cls(np.concatenate([[0], ends[:-1]]), ends)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all pieces."""
        return int((self.ends - self.starts).sum())

    def joined(self) -> Ranges:
        """The same tokens, with adjacent pieces merged."""
        gap = self.starts[1:] != self.ends[:-1]
        return Ranges(
            starts=self.starts[np.concatenate([[True], gap])[: len(self.starts)]],
            ends=self.ends[np.concatenate([gap, [True]])[: len(self.ends)]],
        )


def split_store(store: TokenStore, fraction: float, seed: int) -> tuple[Ranges, Ranges | None]:
    """The training part and the validation part of a store. Every token is in exactly one part.

    `fraction` of the documents, at least one and never all, are held out. The choice depends only
    on the seed and the number of documents. For a single text, the end is held out. Pairs of
    preferences stay together.

    Returns:
        The validation part is None if the fraction is 0 or the data is too small: a single token, a
        single pair, or a single document that is not text.
    """
    all_ranges = Ranges.of(store)
    starts, ends = all_ranges.starts, all_ranges.ends
    each = 2 if store.kind == "preference" else 1
    num_units, num_tokens = len(ends) // each, int(ends[-1])
    if fraction == 0 or num_tokens == 1 or (num_units == 1 and store.kind != "text"):
        return all_ranges, None
    if num_units == 1:
        # Two, because a single token cannot be predicted.
        cut = num_tokens - min(max(round(fraction * num_tokens), 2), num_tokens - 1)
        return Ranges(starts, np.array([cut])), Ranges(np.array([cut]), ends)
    number = min(max(round(fraction * num_units), 1), num_units - 1)
    drawn = draw(key_from(seed, 3), np.arange(num_units))
    chosen = np.zeros(num_units, dtype=np.bool_)
    chosen[np.argpartition(drawn, number)[:number]] = True
    held_out = np.repeat(chosen, each)
    return Ranges(starts[~held_out], ends[~held_out]), Ranges(starts[held_out], ends[held_out])


def make_table(
    data: DataConfig, source: SourceConfig, store: TokenStore, ranges: Ranges
) -> SampleTable:
    """The samples of a part of a source's tokens, by the kind of its documents."""
    length = data.seq_length
    isolates = isolates_documents(data, source)
    match store.kind:
        case "text" if data.packing:
            return packed(store, ranges, length, isolates=isolates)
        case "text":
            return cut(store, ranges, length)
        case "preference":
            return pairs(store, ranges, length, too_long=data.too_long)
        case _:
            how = {"packs": data.packing, "isolates": isolates}
            return whole(store, ranges, length, too_long=data.too_long, **how)


def packed(
    store: TokenStore, ranges: Ranges, seq_length: int, *, isolates: bool = False
) -> SampleTable:
    """Concatenate documents and cut them into full samples.

    Tokens at the end that do not fill a sample are dropped. A text shorter than one sample becomes
    a single padded sample. If documents are isolated, a document's last token does not predict the
    first token of the next document.
    """
    spans = ranges if isolates else ranges.joined()
    last = ranges.num_tokens - 1  # the last token has no target
    num_samples = last // seq_length or min(last, 1)
    length = min(seq_length, last)
    is_full = length == seq_length
    return SampleTable(
        store,
        spans.starts,
        spans.ends - spans.starts,
        "none" if isolates else "next",
        seq_length if is_full else (np.zeros(1, np.int64), np.full(1, length, np.int64)),
        num_samples=num_samples,
        how=f"packed:{seq_length}{':isolated' if isolates else ''}",
        counts=SampleCounts(
            documents=len(ranges.starts),
            samples=num_samples,
            used=num_samples * length,
            places=num_samples * seq_length,
        ),
        isolates=isolates,
    )


def cut(store: TokenStore, ranges: Ranges, seq_length: int) -> SampleTable:
    """One document of text per sample. Long documents are cut, short documents padded at the end.

    Pieces overlap by one token, so each token of a document but its first is a target once.
    """
    lengths = ranges.ends - ranges.starts - 1
    pieces = -(-lengths // seq_length)
    ends = np.cumsum(lengths)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = np.repeat(ends - lengths, pieces) + number * seq_length
    return SampleTable(
        store,
        ranges.starts,
        lengths,
        "own",
        (first, np.minimum(first + seq_length, np.repeat(ends, pieces))),
        num_samples=len(first),
        how=f"documents:{seq_length}",
        counts=SampleCounts(
            documents=len(lengths),
            untrained=int((lengths == 0).sum()),
            samples=len(first),
            used=int(lengths.sum()),
            places=len(first) * seq_length,
        ),
    )


def whole(
    store: TokenStore,
    ranges: Ranges,
    seq_length: int,
    *,
    packs: bool,
    isolates: bool,
    too_long: TooLong,
) -> SampleTable:
    """Pack whole documents into samples, or put one document into each sample.

    A document's last token is not an input, so n tokens take n-1 places, each with its target. If a
    document needs more places than a sample has, its end is cut or the document is dropped. A
    document without a trained token is dropped. Documents in a sample keep the source's order.
    """
    isolates = packs and isolates
    kept, targets, counts = _fit(store, ranges, seq_length, 1, too_long)
    lengths = kept.ends - kept.starts - 1
    if packs:
        order, sample_ends = best_fit(lengths, seq_length)
    else:
        order, sample_ends = np.arange(len(lengths)), np.arange(1, len(lengths) + 1)
    borders = _sums(lengths[order], sample_ends)
    how = f"{'packed' if packs else 'single'}:{'isolated' if isolates else 'joined'}"
    num_samples = len(sample_ends)
    return SampleTable(
        store,
        kept.starts[order],
        lengths[order],
        "own",
        (borders[:-1], borders[1:]),
        num_samples=num_samples,
        how=f"{how}:{seq_length}:{too_long}",
        counts=replace(counts, samples=num_samples, places=num_samples * seq_length),
        targets=np.diff(_sums(targets[order], sample_ends)),
        isolates=isolates,
    )


def pairs(store: TokenStore, ranges: Ranges, seq_length: int, *, too_long: TooLong) -> SampleTable:
    """Two answers to one prompt: the chosen one in the first row, the rejected one in the second.

    Pairs are not packed. If a document needs more places than a row has, its end is cut or the pair
    is dropped. A pair with a document without a trained token is dropped.
    """
    kept, targets, counts = _fit(store, ranges, seq_length, 2, too_long)
    lengths = kept.ends - kept.starts - 1
    ends = np.cumsum(lengths)
    num_samples = len(lengths) // 2
    return SampleTable(
        store,
        kept.starts,
        lengths,
        "own",
        (ends - lengths, ends),
        num_samples=num_samples,
        how=f"pairs:{seq_length}:{too_long}",
        counts=replace(counts, samples=num_samples, places=2 * num_samples * seq_length),
        targets=targets.reshape(-1, 2).sum(1),
        rows_per_sample=2,
    )


def _fit(
    store: TokenStore, ranges: Ranges, seq_length: int, each: int, too_long: TooLong
) -> tuple[Ranges, Int64Array, SampleCounts]:
    # Documents cut to seq_length + 1 tokens, without unusable documents (`each` are tested
    # together), the number of trained tokens of each, and counts without samples.
    starts = np.asarray(ranges.starts, dtype=np.int64)
    given = np.asarray(ranges.ends, dtype=np.int64)
    assert len(starts) % each == 0, "pairs are not split"
    ends = np.minimum(given, starts + seq_length + 1)
    is_long = np.logical_or.reduce((given > ends).reshape(-1, each), axis=1)
    targets = _count_trained(store, starts, ends)
    is_trained = np.logical_and.reduce((targets > 0).reshape(-1, each), axis=1)
    fits = np.logical_not(is_long & (too_long == "drop"))
    kept = fits & is_trained
    by_document = np.repeat(kept, each)
    ranges = Ranges(starts[by_document], ends[by_document])
    counts = SampleCounts(
        documents=len(is_long),
        truncated=int((is_long & kept).sum()),
        too_long=int((~fits).sum()),
        untrained=int((fits & ~is_trained).sum()),
        used=ranges.num_tokens - len(ranges.starts),
    )
    return ranges, targets[by_document], counts


def _count_trained(store: TokenStore, starts: Int64Array, ends: Int64Array) -> Int64Array:
    # Trained tokens of each document. The first token of a document is never predicted.
    counts: Int64Array = np.maximum(ends - starts - 1, 0)
    if store.trained is None:
        return counts
    long_enough = np.flatnonzero(counts)
    for first in range(0, len(long_enough), _DOCUMENTS_AT_ONCE):
        documents = long_enough[first : first + _DOCUMENTS_AT_ONCE]
        low, high = int(starts[documents].min()), int(ends[documents].max())
        # One more, because a border may be after the last token.
        trained = np.zeros(high - low + 1, dtype=np.int32)
        trained[:-1] = store.trained[low:high] != 0
        borders = np.stack([starts[documents] + 1, ends[documents]], 1).ravel() - low
        counts[documents] = np.add.reduceat(trained, borders)[::2]
    return counts


def _sums(per_document: Int64Array, sample_ends: Int64Array) -> Int64Array:
    # Cumulative sums over the documents of the samples, starting with 0.
    sums = np.concatenate([[0], np.cumsum(per_document)])
    return np.asarray(sums[np.concatenate([[0], sample_ends])], dtype=np.int64)


def best_fit(lengths: Int64Array, capacity: int) -> tuple[Int64Array, Int64Array]:
    """Assign documents to few samples by best fit decreasing.

    The longest document comes first, and goes to the sample with the least remaining room.
    Documents of one length are assigned together, so that millions take only seconds. The same
    lengths always give the same samples.

    Args:
        lengths: places that each document takes; 1 to `capacity`.

    Returns:
        The documents' numbers, sample after sample, in ascending order within a sample; and for
        each sample the position after its last document.

    Source: Johnson 1973, Near-optimal bin packing algorithms, section 3; grouped by length as in
    Krell et al. 2021 (arXiv:2107.02027), section 3.1.
    """
    if not lengths.size:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    assert 1 <= lengths.min() <= lengths.max() <= capacity
    longest_first = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[longest_first], return_index=True)
    sample_of = np.empty(lengths.shape, dtype=np.int64)
    room = _Room(capacity)
    for size, documents in zip(-sizes, np.split(longest_first, firsts[1:]), strict=True):
        room.assign(int(size), documents, sample_of)
    by_sample = np.argsort(sample_of, kind="stable")
    return by_sample, np.cumsum(np.bincount(sample_of, minlength=room.num_samples))


class _Room:
    """The samples so far, by their number of free places."""

    def __init__(self, capacity: int) -> None:
        self.num_samples = 0
        self._capacity = capacity
        self._free: list[int] = []  # ascending; the keys below
        self._samples: dict[int, list[Int64Array]] = {}

    def assign(self, size: int, documents: Int64Array, sample_of: Int64Array) -> None:
        """Assign each of these documents of one size to a sample, in `sample_of`."""
        while documents.size:
            free, samples = self._take(size, documents.size)
            each = free // size
            count = min(documents.size, samples.size * each)
            sample_of[documents[:count]] = np.repeat(samples, each)[:count]
            filled, rest = divmod(count, each)
            self._put(free - each * size, samples[:filled])
            if rest:
                self._put(free - rest * size, samples[filled : filled + 1])
                filled += 1
            self._put(free, samples[filled:])
            documents = documents[count:]

    def _take(self, size: int, wanted: int) -> tuple[int, Int64Array]:
        # The samples with the least room for `size`, or new samples, and that room.
        at = bisect_left(self._free, size)
        if at < len(self._free):
            free = self._free[at]
            samples = self._samples[free].pop()
            if not self._samples[free]:
                del self._samples[free], self._free[at]
            return free, samples
        count = -(-wanted // (self._capacity // size))
        self.num_samples += count
        return self._capacity, np.arange(self.num_samples - count, self.num_samples)

    def _put(self, free: int, samples: Int64Array) -> None:
        if not samples.size or not free:
            return
        if free not in self._samples:
            self._samples[free] = []
            insort(self._free, free)
        self._samples[free].append(samples)

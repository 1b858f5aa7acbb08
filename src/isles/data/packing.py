"""Which documents share a sample: best fit, longest first, by their lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from isles.data.rng import Int64Array


def best_fit(lengths: Int64Array, capacity: int) -> tuple[Int64Array, Int64Array]:
    """Deal documents into as few samples as best fit decreasing finds.

    Longest first, each goes to the sample in which it leaves least room; documents of one length
    are dealt together, so that millions take seconds. The same lengths give the same samples.

    Args:
        lengths: places that each document takes; 1 to `capacity`.
        capacity: places in a sample.

    Returns:
        The documents' numbers, sample after sample and in each in ascending order; and for each
        sample the place after its last one among them.

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
        room.deal(int(size), documents, sample_of)
    by_sample = np.argsort(sample_of, kind="stable")
    return by_sample, np.cumsum(np.bincount(sample_of, minlength=room.num_samples))


class _Room:
    """The samples so far, by the places that are left in them."""

    def __init__(self, capacity: int) -> None:
        self.num_samples = 0
        self._capacity = capacity
        self._free: list[int] = []  # ascending; the keys below
        self._samples: dict[int, list[Int64Array]] = {}

    def deal(self, size: int, documents: Int64Array, sample_of: Int64Array) -> None:
        """Give each of these documents of one size a sample, noted in `sample_of`."""
        while documents.size:
            free, samples = self._take(size, documents.size)
            each = free // size
            dealt = min(documents.size, samples.size * each)
            sample_of[documents[:dealt]] = np.repeat(samples, each)[:dealt]
            filled, rest = divmod(dealt, each)
            self._put(free - each * size, samples[:filled])
            if rest:
                self._put(free - rest * size, samples[filled : filled + 1])
                filled += 1
            self._put(free, samples[filled:])
            documents = documents[dealt:]

    def _take(self, size: int, wanted: int) -> tuple[int, Int64Array]:
        """Samples with the least room in which `size` fits, or new ones, and that room."""
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

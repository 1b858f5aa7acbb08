"""Half-open intervals of sample numbers, and the samples of one cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Interval = tuple[int, int]

RESERVE = 2**57
"""First reserved sample number. Reserved numbers are never leased: each cluster has a separate
range."""
_RESERVE_EACH = 2**32


def reserve_of(member_id: str) -> Interval:
    """The sample numbers that a cluster may read while no hub leases any."""
    start = RESERVE + int(member_id[:6], 16) * _RESERVE_EACH
    return start, start + _RESERVE_EACH


def leased(spans: Sequence[Interval]) -> list[Interval]:
    """The intervals without reserved numbers."""
    return [span for span in spans if span[0] < RESERVE]


def joined(spans: Sequence[Interval]) -> list[Interval]:
    """The same numbers in the fewest intervals, in order, each number once."""
    result: list[Interval] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return result


def without(spans: Sequence[Interval], gone: Sequence[Interval]) -> list[Interval]:
    """The numbers of some intervals that are not in others."""
    result: list[Interval] = []
    cuts = joined(gone)
    for start, stop in joined(spans):
        at = start
        for first, last in cuts:
            if last <= at or first >= stop:
                continue
            if first > at:
                result.append((at, first))
            at = last
        if at < stop:
            result.append((at, stop))
    return result


Run = tuple[int, int, int]
"""A position in the cluster's own order, and the interval of samples from there on."""


class OwnSamples:
    """The samples of one cluster in reading order; the same on all its ranks.

    `progress.samples` is a position in this order. Leased samples are added at the end. Samples
    lost to others that are not read yet are removed.
    """

    def __init__(self, member_id: str) -> None:
        self._runs: tuple[Run, ...] = ()  # replaced, never changed: another thread reads it
        self._end = 0
        self.frontier = 0
        """One past the largest number that was leased."""
        self._reported = 0
        self._returned: list[Interval] = []
        self._gone: list[Interval] = []
        self._reserve, _ = reserve_of(member_id)

    def covers(self, first: int, count: int) -> bool:
        """True if the samples at these positions are known."""
        return first + count <= self._end

    def left(self, cursor: int) -> int:
        return self._end - cursor

    def numbers(self, first: int, count: int) -> NDArray[np.int64]:
        spans = self.spans(first, first + count)
        found = np.concatenate([np.arange(start, stop) for start, stop in spans])
        assert len(found) == count, f"{len(found)} of {count} samples are dealt"
        return found

    def spans(self, first: int, end: int) -> list[Interval]:
        """The samples between two positions, in their order."""
        found = []
        for place, start, stop in self._runs:
            low, high = max(first, place), min(end, place + stop - start)
            if low < high:
                found.append((start + low - place, start + high - place))
        return found

    def add(self, spans: Sequence[Interval]) -> None:
        """Add samples at the end."""
        self._gone = without(self._gone, spans)
        for start, stop in spans:
            self._runs = (*self._runs, (self._end, start, stop))
            self._end += stop - start
            if start < RESERVE:
                self.frontier = max(self.frontier, stop)

    def add_reserve(self, count: int) -> None:
        """Add `count` reserved samples, which no other cluster can have, while no hub
        leases any."""
        self.add([(self._reserve, self._reserve + count)])
        self._reserve += count

    def lose(self, spans: Sequence[Interval], cursor: int) -> None:
        """Remove samples that others have, from the position `cursor` on."""
        self._gone = joined([*self._gone, *spans])
        rest = self.spans(cursor, self._end)
        before = [(p, a, min(b, a + cursor - p)) for p, a, b in self._runs if p < cursor]
        self._runs, self._end = tuple(before), cursor
        for span in rest:  # one after the other, to keep their order
            self.add(without([span], self._gone))

    def take_read(self, cursor: int) -> list[Interval]:
        """Samples for a contribution: read since the last call, or given back."""
        found = without([*self.spans(self._reported, cursor), *self._returned], self._gone)
        self._reported, self._returned = cursor, []
        self._runs = tuple(run for run in self._runs if run[0] + run[2] - run[1] > cursor)
        return found

    def give_back(self, spans: Sequence[Interval]) -> None:
        """Return the samples of a contribution that is in no average."""
        self._returned = joined([*self._returned, *spans])

    def holding(self, pending: Sequence[Interval]) -> list[Interval]:
        """All leased samples that are unread, or in no average; pending: samples in
        contributions."""
        mine = [*self.spans(self._reported, self._end), *self._returned, *pending]
        return without(leased(mine), self._gone)

    def record(self) -> dict[str, Any]:
        return {
            "runs": [list(run) for run in self._runs],
            "end": self._end,
            "frontier": self.frontier,
            "reported": self._reported,
            "returned": [list(span) for span in self._returned],
            "gone": [list(span) for span in self._gone],
            "reserve": self._reserve,
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        self._runs = tuple((int(p), int(a), int(b)) for p, a, b in record["runs"])
        self._end, self._reported = int(record["end"]), int(record["reported"])
        self.frontier = int(record["frontier"])
        self._returned = [(int(a), int(b)) for a, b in record["returned"]]
        self._gone = [(int(a), int(b)) for a, b in record["gone"]]
        self._reserve = int(record["reserve"])

    def begin_at(self, cursor: int) -> None:
        """Start at a position: a run without other clusters has read this many samples, in the
        common order."""
        self._end = self._reported = self.frontier = cursor

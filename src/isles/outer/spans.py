"""Sets of sample numbers as intervals: from a number up to, without, another."""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[int, int]

RESERVE = 2**57
"""Sample numbers from here on are dealt by nobody: each cluster has a range of its own."""
_RESERVE_EACH = 2**32


def reserve_of(member_id: str) -> Interval:
    """The sample numbers that a cluster may read while no rendezvous deals any."""
    start = RESERVE + int(member_id[:6], 16) * _RESERVE_EACH
    return start, start + _RESERVE_EACH


def dealt(spans: Sequence[Interval]) -> list[Interval]:
    """Without those of a reserve."""
    return [span for span in spans if span[0] < RESERVE]


def joined(spans: Sequence[Interval]) -> list[Interval]:
    """The same numbers in as few intervals as can be, in order, each number once."""
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

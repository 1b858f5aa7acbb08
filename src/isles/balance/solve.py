"""The split of rows with the shortest step, from the ranks' measured curves."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from isles.balance.curve import Curve, step_seconds
from isles.dist.split import RowSplit

_ALIKE = 1.10
"""Curves that differ by less count as equal, as the difference may be noise."""

_ROUNDING = 1e-12

_EFFORT = 4_000_000
"""Limit of the search for lock-stepped splits, about a second. For dozens of unequal ranks with
thousands of rows, the result may miss the best split by a fraction of a percent."""


def are_alike(curves: Sequence[Curve]) -> bool:
    """True if all ranks are equally fast, within the noise of measuring."""
    shared = min(curve.limit for curve in curves)
    sizes = {min(size, shared) for curve in curves for size in curve.sizes}
    for size in sizes:
        seconds = [curve.time(size) for curve in curves]
        if max(seconds) > _ALIKE * min(seconds):
            return False
    return True


def fastest_split(curves: Sequence[Curve], global_batch_size: int, *, in_step: bool) -> RowSplit:
    """The rows and micro-batch sizes with the shortest `step_seconds`.

    Args:
        curves: curve of each data-parallel rank. Times must never fall with the rows.
        in_step: see RowSplit.
    """
    tables = [_RankTimes(curve, global_batch_size) for curve in curves]
    if in_step:
        return _fastest_in_step(tables, curves, global_batch_size)
    return _fastest_apart(tables, global_batch_size)


class _RankTimes:
    # The times of one rank at every allowed size.

    def __init__(self, curve: Curve, global_batch_size: int) -> None:
        self.limit = min(curve.limit, global_batch_size)
        self.seconds = [curve.time(size) for size in range(1, self.limit + 1)]

    def fits(self, seconds: float) -> int:
        """Most rows of one micro-batch within `seconds`."""
        return bisect_right(self.seconds, seconds * (1 + _ROUNDING))

    def most_rows(self, seconds: float) -> tuple[int, int]:
        """Most rows of any number of micro-batches within `seconds`, and rows of one of them."""
        best = (0, 1)
        for size, each in enumerate(self.seconds, 1):
            whole = int(seconds * (1 + _ROUNDING) / each)
            rest = min(self.fits(max(0.0, seconds - whole * each)), size - 1)
            best = max(best, (whole * size + rest, size))
        return best

    def cheapest(self, rows: int) -> tuple[float, int]:
        """Least seconds for `rows`, and the largest micro-batch size that reaches them."""
        if rows == 0:
            return self.seconds[0], 1
        best, chosen = math.inf, 1
        for size in range(min(rows, self.limit), 0, -1):
            whole, rest = divmod(rows, size)
            seconds = whole * self.seconds[size - 1] + (self.seconds[rest - 1] if rest else 0.0)
            if seconds < best * (1 - _ROUNDING):
                best, chosen = seconds, size
        return best, chosen


def _fastest_apart(tables: Sequence[_RankTimes], rows: int) -> RowSplit:
    # Each rank separately: find the shortest time in which all rows can be done, by bisection. The
    # rows of a rank within a given time have a closed form. A rank needs at least the time of one
    # row, even if it has no rows: see Curve.time.
    low = high = max(table.seconds[0] for table in tables)

    def can(seconds: float) -> int:
        return sum(table.most_rows(seconds)[0] for table in tables)

    while can(high) < rows:
        low, high = high, 2 * high
    while high > low * (1 + _ROUNDING):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if can(middle) >= rows else (middle, high)
    allotted = [table.most_rows(high)[0] for table in tables]
    _take_back(allotted, [table.cheapest for table in tables], sum(allotted) - rows)
    sizes = [table.cheapest(own)[1] for table, own in zip(tables, allotted, strict=True)]
    return RowSplit(tuple(allotted), tuple(sizes), in_step=False)


def _take_back(
    allotted: list[int], cheapest: Sequence[Callable[[int], tuple[float, int]]], excess: int
) -> None:
    # Take `excess` rows from the ranks that would finish last. Take the last row of a rank only at
    # the end, as a rank without rows still computes one.

    def entry(rank: int) -> tuple[bool, float, int]:
        return allotted[rank] == 1, -cheapest[rank](allotted[rank])[0], -rank

    heap = [entry(rank) for rank, rows in enumerate(allotted) if rows]
    heapq.heapify(heap)
    for _ in range(excess):
        rank = -heapq.heappop(heap)[2]
        allotted[rank] -= 1
        if allotted[rank]:
            heapq.heappush(heap, entry(rank))


def _fastest_in_step(tables: Sequence[_RankTimes], curves: Sequence[Curve], rows: int) -> RowSplit:
    # All ranks make the same number of micro-steps, and each micro-step takes the time of its
    # slowest rank. For every number of steps, and every length of the shortest step (a rank's time
    # at some size), put the remaining rows into longer steps as cheaply as possible.
    floor = max(table.seconds[0] for table in tables)
    times = sorted({t for table in tables for t in table.seconds if t > floor} | {floor})
    plans = [_Plan(tables, t) for t in times]
    best_split = _equal_steps(plans, rows)
    best = step_seconds(best_split, curves)
    hopeful = []
    for steps in range(2, min(rows, int(best / floor) + 1) + 1):
        for index, plan in enumerate(plans):
            missing = rows - steps * plan.rows
            if missing <= 0:
                break  # equal steps of at most this length have every row
            if (least := plan.least_seconds(steps, missing)) < best:
                hopeful.append((least, steps, index, missing))
    effort = _EFFORT
    for least, steps, index, missing in sorted(hopeful):
        effort -= missing * len(tables) * steps
        if least >= best * (1 - _ROUNDING) or effort < 0:
            break
        split = _split_of(plans[index].allocate(steps, missing), steps, rows)
        if (seconds := step_seconds(split, curves)) < best * (1 - _ROUNDING):
            best, best_split = seconds, split
    return best_split


def _equal_steps(plans: Sequence[_Plan], rows: int) -> RowSplit:
    # The best split among those with equally long steps.
    counts = [max(1, -(-rows // plan.rows)) for plan in plans]
    chosen = min(
        range(len(plans)), key=lambda index: (counts[index] * plans[index].shortest, counts[index])
    )
    allotted = [own * counts[chosen] for own in plans[chosen].held]
    return _split_of(allotted, counts[chosen], rows)


class _Plan:
    # Steps of at least `shortest` seconds, in each of which every rank computes all it can.

    def __init__(self, tables: Sequence[_RankTimes], shortest: float) -> None:
        self.shortest = shortest
        self.held = [table.fits(shortest) for table in tables]
        self.rows = sum(self.held)
        more = sorted(
            (table.seconds[own], rank)
            for rank, (table, own) in enumerate(zip(tables, self.held, strict=True))
            if own < table.limit
        )
        self._order = [rank for _, rank in more]
        # Extra cost of a step if the first one, two … of these ranks take one more row.
        self._costs = [seconds - shortest for seconds, _ in more]
        per_row = [cost / count for count, cost in enumerate(self._costs, 1)]
        self._cost_per_row = min(per_row, default=math.inf)

    def least_seconds(self, steps: int, missing: int) -> float:
        """Lower bound of seconds for any split with `steps` steps that has the missing rows."""
        if missing > (steps - 1) * len(self._costs):
            return math.inf
        return steps * self.shortest + missing * self._cost_per_row

    def allocate(self, steps: int, missing: int) -> list[int]:
        """Rows of each rank after the cheapest allocation of the missing rows, or of some more."""
        allotted = [own * steps for own in self.held]
        for taken in _cheapest_sum(self._costs, missing, steps - 1):
            for rank in self._order[:taken]:
                allotted[rank] += 1
        return allotted


def _split_of(allotted: list[int], steps: int, rows: int) -> RowSplit:
    # Take excess rows from the ranks with most rows. No step becomes longer by it.
    heap = [(-own, -rank) for rank, own in enumerate(allotted)]
    heapq.heapify(heap)
    for _ in range(sum(allotted) - rows):
        own, rank = heap[0]
        heapq.heapreplace(heap, (own + 1, rank))
    kept = [-own for own, _ in sorted(heap, key=lambda entry: -entry[1])]
    return RowSplit(tuple(kept), tuple(max(1, -(-own // steps)) for own in kept), in_step=True)


def _cheapest_sum(costs: Sequence[float], missing: int, most: int) -> list[int]:
    # At most `most` numbers n >= 1 with a sum of at least `missing` and the least sum of
    # costs[n-1]. Each row of the table allows one more number, and has the least sum and a number.
    rows = [[(0.0, 0)] + [(math.inf, 0)] * missing]
    for _ in range(most):
        before = rows[-1]
        more = (
            min((before[max(0, need - n)][0] + cost, n) for n, cost in enumerate(costs, 1))
            for need in range(1, missing + 1)
        )
        rows.append([(0.0, 0), *more])
    chosen = []
    for row in reversed(rows):
        if missing <= 0:
            break
        chosen.append(row[missing][1])
        missing -= chosen[-1]
    return chosen

"""Whether the rows should be dealt anew, from what the ranks were seen to need. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isles.balance.curve import Curve, rank_seconds, step_seconds
from isles.balance.revise import Dealt, History, equal_devices
from isles.balance.solve import are_alike, fastest_split
from isles.dist.split import RowSplit, even_split, shared_split

WINDOWS = 5
"""Parts of the steps that are looked at. What is not so in every one of them is noise."""

_DEVIATION = 1.10
"""Devices that are further off than this in every window are not what they were taken for."""

_APART = 1.5
"""A device is first told apart from equal ones if it is further off than this in every window. Rows
that differ add the same numbers in another order, and two runs on equal devices are to be equal."""

_LEAST_GAIN = 0.05
"""A new split must save at least this part of a step: less is noise, and rows would flap."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A better split.

    Args:
        split: to be used from the next step on.
        curves: what is now known of the ranks.
        reason: for the log.
    """

    split: RowSplit
    curves: tuple[Curve, ...]
    reason: str


def pooled(
    curves: Sequence[Curve], equals: Sequence[int], apart: float = float("inf")
) -> tuple[Curve, ...]:
    """The curves with equal devices taken for equally fast: noise only makes a pass slower, so the
    least time that any of them needed is that of all.

    Args:
        curves: of each data-parallel rank.
        equals: for each of them, the first one on equal devices.
        apart: times as slow at every size that a rank must be to keep a curve of its own.
    """
    found = list(curves)
    for first in set(equals):
        ranks = [rank for rank, other in enumerate(equals) if other == first]
        sizes = sorted({size for rank in ranks for size in curves[rank].sizes})
        best = {size: min(curves[rank].time(size) for rank in ranks) for size in sizes}
        for rank in ranks:
            own = curves[rank]
            if min(own.time(size) / best[size] for size in sizes) <= apart:
                found[rank] = Curve.of(best, own.limit)
    return tuple(found)


def choose(
    curves: Sequence[Curve], global_batch_size: int, even_size: int, *, in_step: bool
) -> RowSplit:
    """The split for these ranks: the even one where they are alike, else the fastest.

    Args:
        curves: of each data-parallel rank.
        global_batch_size: rows to deal.
        even_size: micro-batch size of the even split.
        in_step: see RowSplit.
    """
    if are_alike(curves):
        return even_split(global_batch_size, len(curves), even_size, in_step=in_step)
    return fastest_split(curves, global_batch_size, in_step=in_step)


def gain_over_even(split: RowSplit, curves: Sequence[Curve]) -> float:
    """How many times as fast a step is as with even rows, by these curves."""
    limits = [curve.limit for curve in curves]
    even = shared_split(split.global_batch_size, [1.0] * len(curves), limits, in_step=split.in_step)
    return step_seconds(even, curves) / step_seconds(split, curves)


def windows(steps: Sequence[float]) -> list[float]:
    """Means of consecutive parts of some figures; there must be at least WINDOWS of them."""
    bounds = [index * len(steps) // WINDOWS for index in range(WINDOWS + 1)]
    return [statistics.fmean(steps[a:b]) for a, b in itertools.pairwise(bounds)]


def revise(
    split: RowSplit,
    curves: Sequence[Curve],
    measured: Sequence[Sequence[float]],
    equals: Sequence[int],
    even_size: int,
) -> Revision | None:
    """A better split, if what was measured says in every window that there is one.

    Args:
        split: in use.
        curves: by which it was chosen.
        measured: for each data-parallel rank, what its own computing took in a step, window by
            window, in any unit; the windows of all ranks are of the same steps.
        equals: for each data-parallel rank, the first one on equal devices.
        even_size: micro-batch size of the even split.
    """
    assert len(measured) == len(curves) == len(split.rows)
    expected = [rank_seconds(split, rank, curve) for rank, curve in enumerate(curves)]
    factors = [[s / one for s in own] for own, one in zip(measured, expected, strict=True)]
    if min(map(min, factors)) <= 0:
        return None
    # Where equal devices have other curves already, two runs are no longer equal by keeping them.
    alike = [
        len({c.seconds for c, o in zip(curves, equals, strict=True) if o == own}) == 1
        for own in equals
    ]
    slower = _slower(factors, equals, [_APART if same else _DEVIATION for same in alike])
    scaled = tuple(curve.scaled(by) for curve, by in zip(curves, slower, strict=True))
    scaled = pooled(scaled, equals, _APART)
    better = choose(scaled, split.global_batch_size, even_size, in_step=split.in_step)
    if step_seconds(split, scaled) <= (1 + _LEAST_GAIN) * step_seconds(better, scaled):
        return None
    reason = "the ranks are as they were measured"
    off = [max(factor, 1 / factor) for factor in slower]
    if max(off) > 1:
        rank = off.index(max(off))
        word = "slower" if slower[rank] > 1 else "faster"
        reason = f"data-parallel rank {rank} is {off[rank]:.2f} times {word} than it was taken for"
    brought, promised = (gain_over_even(split, known) for known in (scaled, curves))
    if abs(promised - 1) > _LEAST_GAIN:
        reason += f", so that its rows bring {brought:.2f} times an even split, not {promised:.2f}"
    return Revision(better, scaled, reason)


def judge(
    history: History, step: int, measured: Sequence[Sequence[float]]
) -> tuple[Dealt, str] | None:
    """What is dealt after this step instead of what is in use, and why; None: that is kept.

    Args:
        history: of the run; its last split is in use.
        step: that is over.
        measured: see `revise`, in seconds.
    """
    now = history.dealt[-1]
    slowest_s = max(map(min, measured))
    # A split that is left as soon as it is looked at, for one that was left before, would come
    # again at once. A device that recovers after a while is another matter.
    is_first_look = now.slowest_s is not None and history.decided_to == now.after_step
    found = revise(now.split, now.curves, measured, equal_devices(now.devices), now.even_size)
    if found is not None:
        split, curves, reason = found.split, found.curves, found.reason
    elif now.slowest_s is not None and slowest_s > now.slowest_s and is_first_look:
        before = history.dealt[-2]
        split, curves = before.split, before.curves
        promised = step_seconds(split, now.curves) / step_seconds(now.split, now.curves)
        brought = now.slowest_s / slowest_s
        reason = f"taken back, as steps are {brought:.2f} times as fast, not {promised:.2f}"
    else:
        return None
    rests = is_first_look and any(each.split == split for each in history.dealt)
    changed = replace(now, split=split, curves=curves, slowest_s=slowest_s, rests=rests)
    return replace(changed, after_step=step), reason


def _slower(
    factors: Sequence[Sequence[float]], equals: Sequence[int], least: Sequence[float]
) -> list[float]:
    # How many times as long as expected each rank needed, where 1 is the device in the middle.
    # From equal devices a rank is told apart by `least`.
    # The unit of what was measured is another than the curves': only ratios between ranks count.
    by_window = list(zip(*factors, strict=True))
    of_equals = [
        [
            _middle([factor for factor, other in zip(window, equals, strict=True) if other == own])
            for own in equals
        ]
        for window in by_window
    ]
    slower = []
    for rank in range(len(equals)):
        own = [w[rank] / of[rank] for w, of in zip(by_window, of_equals, strict=True)]
        others = [of[rank] / _middle(of) for of in of_equals]
        slower.append(_told_apart(own, least[rank]) * _told_apart(others, _DEVIATION))
    return slower


def _told_apart(ratios: Sequence[float], least: float) -> float:
    # The ratio in the middle, if all lie on one side and further off than `least`; else 1.
    is_apart = min(ratios) > least or max(ratios) * least < 1
    return statistics.median(ratios) if is_apart else 1.0


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]

"""The splits that a run has used, and whether what the ranks were seen to need asks for another.

Rank 0 writes the history to the run directory before a split is used, and each checkpoint holds it
too. A start that repeats steps of an earlier one uses the splits that these had, so that a resumed
run adds the same numbers in the same order. Deciding is pure.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from isles.balance.curve import Curve, rank_seconds, step_seconds
from isles.balance.solve import are_alike, fastest_split
from isles.dist.split import RowSplit, even_split, shared_split
from isles.run.records import MAX_LIST_BYTES, read_record, write_record

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
class Device:
    """What one rank computes on.

    Args:
        host: its machine.
        name: of the GPU or the processor.
        dp_rank: which part of the data it reads.
    """

    host: str
    name: str
    dp_rank: int


def equal_devices(devices: Sequence[Device]) -> tuple[int, ...]:
    """For each data-parallel rank, the first one that computes on devices of the same names and on
    the same hosts."""
    found: list[list[tuple[str, str]]] = [[] for _ in {device.dp_rank for device in devices}]
    for device in devices:
        found[device.dp_rank].append((device.host, device.name))
    return tuple(found.index(own) for own in found)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A split, and what it rests on.

    Args:
        after_step: it is used from the step after this one on.
        split: the rows.
        even_size: micro-batch size of the even split, and of evaluation.
        strategy: kind of strategy that it was made for.
        devices: of every rank, in order.
        curves: of each data-parallel rank.
        is_timed: whether the curves are in seconds; else only their ratios mean something.
        slowest_s: seconds of the slowest rank in a step under the split before it, which this one
            must undercut. None: it was not chosen while training.
        rests: whether it is looked at seldom, as one that was left before and came back.
    """

    after_step: int
    split: RowSplit
    even_size: int
    strategy: str
    devices: tuple[Device, ...]
    curves: tuple[Curve, ...]
    is_timed: bool
    slowest_s: float | None = None
    rests: bool = False

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Allocation:
        """From what `asdict` and JSON make of it."""
        split = record["split"]
        return cls(
            after_step=int(record["after_step"]),
            split=RowSplit(
                tuple(split["rows"]), tuple(split["micro_batch_sizes"]), bool(split["in_step"])
            ),
            even_size=int(record["even_size"]),
            strategy=str(record["strategy"]),
            devices=tuple(Device(**device) for device in record["devices"]),
            curves=tuple(Curve.read(curve) for curve in record["curves"]),
            is_timed=bool(record["is_timed"]),
            slowest_s=record["slowest_s"],
            rests=bool(record["rests"]),
        )


@dataclass(frozen=True, slots=True)
class History:
    """The splits of a run, in the order of their steps.

    Args:
        allocations: each is used until the next one's step.
        decided_to: the last step whose split is decided; steps up to it are not looked at again.
    """

    allocations: tuple[Allocation, ...] = ()
    decided_to: int = 0

    def at(self, step: int) -> Allocation | None:
        """What is used after `step`."""
        return next((each for each in reversed(self.allocations) if each.after_step <= step), None)

    def add(self, new: Allocation) -> History:
        """With another one, in place of all that followed its step or was decided at it."""
        kept = tuple(each for each in self.allocations if each.after_step < new.after_step)
        return History((*kept, new), new.after_step)

    def going_on_after(self, step: int, fits: Callable[[Allocation], bool]) -> History | None:
        """What holds for a start after `step`; None: the split of that step does not fit."""
        now = self.at(step)
        if now is None or not fits(now):
            return None
        for each in self.allocations:
            if each.after_step > step and not fits(each):
                # From here on other ranks or devices were there, and decided nothing for these.
                kept = tuple(a for a in self.allocations if a.after_step < each.after_step)
                return History(kept, each.after_step - 1)
        return self

    def decided(self, step: int) -> History:
        """With the split in use kept up to this step."""
        return replace(self, decided_to=max(self.decided_to, step))

    def record(self) -> dict[str, Any]:
        """For a file or a checkpoint."""
        return asdict(self)

    def write(self, file: Path) -> None:
        """Write it durably.

        Raises:
            OSError: the disk is full or read-only; what was there is as it was.
        """
        write_record(file, self.record())

    @classmethod
    def load(cls, file: Path, in_checkpoint: Mapping[str, Any] | None) -> History:
        """From the run directory or, if it reaches further (on another disk), a checkpoint."""
        found = []
        for record in (read_record(file, MAX_LIST_BYTES), in_checkpoint):
            try:
                known = tuple(Allocation.read(each) for each in (record or {})["allocations"])
                found.append(cls(known, int((record or {})["decided_to"])))
            except (KeyError, TypeError, ValueError, AssertionError):
                found.append(cls())  # none, or of another version: measured anew, and overwritten
        return max(found, key=lambda history: (len(history.allocations) > 0, history.decided_to))


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


def revise(now: Allocation, measured: Sequence[Sequence[float]]) -> tuple[Allocation, str] | None:
    """A better allocation, if what was measured says in every window that there is one, and why.

    Args:
        now: in use.
        measured: for each data-parallel rank, what its own computing took in a step, window by
            window, in any unit; the windows of all ranks are of the same steps.

    Returns:
        The allocation, of no step yet, and the reason in words.
    """
    split, curves, equals = now.split, now.curves, equal_devices(now.devices)
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
    better = choose(scaled, split.global_batch_size, now.even_size, in_step=split.in_step)
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
    return replace(now, split=better, curves=scaled), reason


def next_allocation(
    history: History, step: int, measured: Sequence[Sequence[float]]
) -> tuple[Allocation, str] | None:
    """The allocation that replaces the one in use, and why; None: that is kept.

    Args:
        history: of the run; its last split is in use.
        step: that is over.
        measured: see `revise`, in seconds.
    """
    now = history.allocations[-1]
    slowest_s = max(map(min, measured))
    is_first_look = now.slowest_s is not None and history.decided_to == now.after_step
    found = revise(now, measured)
    if found is not None:
        changed, reason = found
    elif now.slowest_s is not None and is_first_look and slowest_s > now.slowest_s:
        before = history.allocations[-2]
        promised = step_seconds(before.split, now.curves) / step_seconds(now.split, now.curves)
        brought = now.slowest_s / slowest_s
        reason = f"taken back, as steps are {brought:.2f} times as fast, not {promised:.2f}"
        changed = replace(now, split=before.split, curves=before.curves)
    else:
        return None
    # A split that is left as soon as it is looked at, for one that was left before, would come
    # again at once. A device that recovers after a while is another matter.
    rests = is_first_look and any(each.split == changed.split for each in history.allocations)
    return replace(changed, after_step=step, slowest_s=slowest_s, rests=rests), reason


def _slower(
    factors: Sequence[Sequence[float]], equals: Sequence[int], least: Sequence[float]
) -> list[float]:
    # How many times as long as expected each rank needed, where 1 is the device in the middle.
    # From equal devices a rank is told apart by `least`.
    # The unit of what was measured is another than the curves': only ratios between ranks count.
    by_window = list(zip(*factors, strict=True))
    of_equals = [
        [
            statistics.median_low(
                [factor for factor, other in zip(window, equals, strict=True) if other == own]
            )
            for own in equals
        ]
        for window in by_window
    ]
    slower = []
    for rank in range(len(equals)):
        own = [w[rank] / of[rank] for w, of in zip(by_window, of_equals, strict=True)]
        others = [of[rank] / statistics.median_low(of) for of in of_equals]
        slower.append(_differs(own, least[rank]) * _differs(others, _DEVIATION))
    return slower


def _differs(ratios: Sequence[float], least: float) -> float:
    # The ratio in the middle, if all lie on one side and further off than `least`; else 1.
    is_apart = min(ratios) > least or max(ratios) * least < 1
    return statistics.median(ratios) if is_apart else 1.0

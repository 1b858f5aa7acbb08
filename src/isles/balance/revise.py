"""The splits of a run, and the decision whether measured times require another split.

Rank 0 writes the history to the run directory before a split is used, and each checkpoint has it
too. An attempt that repeats steps uses the same splits for them, so that a resumed run adds the
same numbers in the same order. Decisions are pure functions.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from isles.balance.curve import Curve, rank_seconds, step_seconds
from isles.balance.gpus import GpuSpeed, is_ahead, is_held_back
from isles.balance.solve import are_alike, fastest_split
from isles.dist.split import RowSplit, even_split, shared_split
from isles.run.records import MAX_LIST_BYTES, read_record, write_record

Figure = TypeVar("Figure")

WINDOWS = 5
"""Number of windows of the reviewed steps. A deviation that is not in every window is noise."""

_DEVIATION = 1.10
"""Factor beyond which, in every window, the speed of a device differs from its curve."""

_APART = 1.5
"""Factor beyond which, in every window, a device is treated as different from equal devices. Other
rows add the same numbers in another order, and two runs on equal devices should be equal."""

_SHOWN = 1.15
"""The same factor, if the clocks of the GPUs or the causes of throttling differ in the same way in
every window. Then the cause is the GPU and not noise."""

_LEAST_GAIN = 0.05
"""A new split must save at least this share of a step: smaller gains are noise, and rows would
alternate."""


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of one rank.

    Args:
        host: its host.
        name: name of the GPU or the processor.
        dp_rank: its data-parallel rank.
    """

    host: str
    name: str
    dp_rank: int


def equal_devices(devices: Sequence[RankDevice]) -> tuple[int, ...]:
    """For each data-parallel rank, the first rank with devices of the same names on the same
    hosts."""
    found: list[list[tuple[str, str]]] = [[] for _ in {device.dp_rank for device in devices}]
    for device in devices:
        found[device.dp_rank].append((device.host, device.name))
    return tuple(found.index(own) for own in found)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A split, with the measurements that it is based on.

    Args:
        after_step: the split is used after this step.
        split: the rows.
        even_size: micro-batch size of the even split, and of evaluation.
        strategy: kind of strategy that it was made for.
        devices: device of every rank, in order.
        curves: curve of each data-parallel rank.
        is_timed: whether the curves are in seconds. If not, only their ratios have a meaning.
        slowest_s: seconds of the slowest rank per step under the previous split. This split must
            be faster. None: the split was not chosen during training.
        rests: whether reviews are rare, as the split was replaced before and is used again.
    """

    after_step: int
    split: RowSplit
    even_size: int
    strategy: str
    devices: tuple[RankDevice, ...]
    curves: tuple[Curve, ...]
    is_timed: bool
    slowest_s: float | None = None
    rests: bool = False

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Allocation:
        """An allocation from its `asdict`, also after JSON."""
        split = record["split"]
        return cls(
            after_step=int(record["after_step"]),
            split=RowSplit(
                tuple(split["rows"]), tuple(split["micro_batch_sizes"]), bool(split["in_step"])
            ),
            even_size=int(record["even_size"]),
            strategy=str(record["strategy"]),
            devices=tuple(RankDevice(**device) for device in record["devices"]),
            curves=tuple(Curve.read(curve) for curve in record["curves"]),
            is_timed=bool(record["is_timed"]),
            slowest_s=record["slowest_s"],
            rests=bool(record["rests"]),
        )


@dataclass(frozen=True, slots=True)
class SplitHistory:
    """The splits of a run, in the order of their steps.

    Args:
        allocations: each is used until the step of the next.
        decided_to: the last step whose split is decided. Steps up to it are not reviewed again.
    """

    allocations: tuple[Allocation, ...] = ()
    decided_to: int = 0

    def at(self, step: int) -> Allocation | None:
        """The allocation in use after `step`."""
        return next((each for each in reversed(self.allocations) if each.after_step <= step), None)

    def add(self, new: Allocation) -> SplitHistory:
        """A history with a new allocation, which replaces all at or after its step."""
        kept = tuple(each for each in self.allocations if each.after_step < new.after_step)
        return SplitHistory((*kept, new), new.after_step)

    def going_on_after(self, step: int, fits: Callable[[Allocation], bool]) -> SplitHistory | None:
        """The history for an attempt from `step`. None: the split of that step does not fit."""
        now = self.at(step)
        if now is None or not fits(now):
            return None
        for each in self.allocations:
            if each.after_step > step and not fits(each):
                # Later decisions were made for other ranks or devices.
                kept = tuple(a for a in self.allocations if a.after_step < each.after_step)
                return SplitHistory(kept, each.after_step - 1)
        return self

    def decided(self, step: int) -> SplitHistory:
        """A history that keeps the current split up to this step."""
        return replace(self, decided_to=max(self.decided_to, step))

    def record(self) -> dict[str, Any]:
        """The history for a file or a checkpoint."""
        return asdict(self)

    def write(self, file: Path) -> None:
        """Write the history durably.

        Raises:
            OSError: the disk is full or read-only. The file is unchanged.
        """
        write_record(file, self.record())

    @classmethod
    def load(cls, file: Path, in_checkpoint: Mapping[str, Any] | None) -> SplitHistory:
        """The longer history: of the run directory, or of a checkpoint (on another disk)."""
        found = []
        for record in (read_record(file, MAX_LIST_BYTES), in_checkpoint):
            try:
                known = tuple(Allocation.read(each) for each in (record or {})["allocations"])
                found.append(cls(known, int((record or {})["decided_to"])))
            except (KeyError, TypeError, ValueError, AssertionError):
                found.append(cls())  # missing, or of another version: measure again
        return max(found, key=lambda history: (len(history.allocations) > 0, history.decided_to))


def pooled(
    curves: Sequence[Curve], equals: Sequence[int], apart: Sequence[float] | None = None
) -> tuple[Curve, ...]:
    """Curves that treat equal devices as equally fast. Noise only makes a pass slower, so the
    shortest time of any of them is the time of all.

    Args:
        curves: curve of each data-parallel rank.
        equals: for each of them, the first rank with equal devices.
        apart: for each of them, slowdown at every size that it needs to keep its own curve. None:
            no rank keeps it.
    """
    found = list(curves)
    least = apart or [float("inf")] * len(curves)
    for first in set(equals):
        ranks = [rank for rank, other in enumerate(equals) if other == first]
        sizes = sorted({size for rank in ranks for size in curves[rank].sizes})
        best = {size: min(curves[rank].time(size) for rank in ranks) for size in sizes}
        for rank in ranks:
            own = curves[rank]
            if min(own.time(size) / best[size] for size in sizes) <= least[rank]:
                found[rank] = Curve.of(best, own.limit)
    return tuple(found)


def choose(
    curves: Sequence[Curve], global_batch_size: int, even_size: int, *, in_step: bool
) -> RowSplit:
    """The split for these ranks: even if they are equally fast, otherwise the fastest.

    Args:
        curves: curve of each data-parallel rank.
        even_size: micro-batch size of the even split.
        in_step: see RowSplit.
    """
    if are_alike(curves):
        return even_split(global_batch_size, len(curves), even_size, in_step=in_step)
    return fastest_split(curves, global_batch_size, in_step=in_step)


def gain_over_even(split: RowSplit, curves: Sequence[Curve]) -> float:
    """Speedup of a step over even rows, by these curves."""
    limits = [curve.limit for curve in curves]
    even = shared_split(split.global_batch_size, [1.0] * len(curves), limits, in_step=split.in_step)
    return step_seconds(even, curves) / step_seconds(split, curves)


def windows(found: Sequence[Figure]) -> list[Sequence[Figure]]:
    """WINDOWS consecutive parts of a list with at least WINDOWS figures."""
    bounds = [index * len(found) // WINDOWS for index in range(WINDOWS + 1)]
    return [found[a:b] for a, b in itertools.pairwise(bounds)]


def revise(
    now: Allocation,
    measured: Sequence[Sequence[float]],
    gpus: Sequence[Sequence[GpuSpeed]] | None = None,
) -> tuple[Allocation, str] | None:
    """A better allocation, if the measurements of every window support it, and the reason.

    Args:
        now: the current allocation.
        measured: for each data-parallel rank, its computing time per step, window by window, in
            any unit. The windows of all ranks are of the same steps.
        gpus: for each data-parallel rank, its GPU in each window, by its driver. None: unknown.

    Returns:
        The allocation, without a step yet, and the reason as text.
    """
    split, curves, equals = now.split, now.curves, equal_devices(now.devices)
    assert len(measured) == len(curves) == len(split.rows)
    expected = [rank_seconds(split, rank, curve) for rank, curve in enumerate(curves)]
    factors = [[s / one for s in own] for own, one in zip(measured, expected, strict=True)]
    if min(map(min, factors)) <= 0:
        return None
    # If equal devices already have different curves, keeping them no longer makes runs equal.
    alike = [
        len({c.seconds for c, o in zip(curves, equals, strict=True) if o == own}) == 1
        for own in equals
    ]
    held, ahead = _shown(gpus, equals)
    least = [
        (_least(same, is_held), _least(same, is_free))
        for same, is_held, is_free in zip(alike, held, ahead, strict=True)
    ]
    slower = _slower(factors, equals, least)
    scaled = tuple(curve.scaled(by) for curve, by in zip(curves, slower, strict=True))
    of_equals = [
        any(held[rank] or ahead[rank] for rank, other in enumerate(equals) if other == own)
        for own in equals
    ]
    apart = [_least(same, shows) for same, shows in zip(alike, of_equals, strict=True)]
    scaled = pooled(scaled, equals, apart)
    better = choose(scaled, split.global_batch_size, now.even_size, in_step=split.in_step)
    if step_seconds(split, scaled) <= (1 + _LEAST_GAIN) * step_seconds(better, scaled):
        return None
    reason = "the speeds of the ranks are as measured"
    off = [max(factor, 1 / factor) for factor in slower]
    if max(off) > 1:
        rank = off.index(max(off))
        word = "slower" if slower[rank] > 1 else "faster"
        reason = f"data-parallel rank {rank} is {off[rank]:.2f} times {word} than expected"
        if gpus is not None and (held[rank] or ahead[rank]):
            clock_mhz, usual_mhz = _clocks(gpus, equals, rank)
            reason += f" (its GPU at {clock_mhz:.0f} MHz, equal GPUs at {usual_mhz:.0f} MHz)"
    brought, promised = (gain_over_even(split, known) for known in (scaled, curves))
    if abs(promised - 1) > _LEAST_GAIN:
        reason += f", so its rows give {brought:.2f} times an even split, not {promised:.2f}"
    return replace(now, split=better, curves=scaled), reason


def next_allocation(
    history: SplitHistory,
    step: int,
    measured: Sequence[Sequence[float]],
    gpus: Sequence[Sequence[GpuSpeed]] | None = None,
) -> tuple[Allocation, str] | None:
    """The allocation that replaces the current one, and the reason. None: keep the current one.

    Args:
        history: history of the run. Its last split is in use.
        step: the step that is over.
        measured: see `revise`, in seconds.
        gpus: see `revise`.
    """
    now = history.allocations[-1]
    slowest_s = max(map(min, measured))
    is_first_look = now.slowest_s is not None and history.decided_to == now.after_step
    found = revise(now, measured, gpus)
    if found is not None:
        changed, reason = found
    elif now.slowest_s is not None and is_first_look and slowest_s > now.slowest_s:
        before = history.allocations[-2]
        promised = step_seconds(before.split, now.curves) / step_seconds(now.split, now.curves)
        brought = now.slowest_s / slowest_s
        reason = f"going back, as steps are {brought:.2f} times as fast, not {promised:.2f}"
        changed = replace(now, split=before.split, curves=before.curves)
    else:
        return None
    # If the first review of a split returns to an earlier split, the next review could switch back
    # again, so reviews become rare. A device that recovers after a while is another matter.
    rests = is_first_look and any(each.split == changed.split for each in history.allocations)
    return replace(changed, after_step=step, slowest_s=slowest_s, rests=rests), reason


def _least(same: bool, is_shown: bool) -> float:
    # The factor that tells equal devices apart: with equal curves, and by their drivers.
    return _DEVIATION if not same else _SHOWN if is_shown else _APART


def _shown(
    gpus: Sequence[Sequence[GpuSpeed]] | None, equals: Sequence[int]
) -> tuple[list[bool], list[bool]]:
    # For each rank, whether its driver reports in every window that it is slower than equal
    # devices, and whether it is faster.
    if gpus is None:
        return [False] * len(equals), [False] * len(equals)
    ranks = range(len(equals))
    groups = [[gpus[rank] for rank in ranks if equals[rank] == own] for own in equals]
    held, ahead = (
        [
            all(shows(gpu, others) for gpu, *others in zip(gpus[rank], *groups[rank], strict=True))
            for rank in ranks
        ]
        for shows in (is_held_back, is_ahead)
    )
    return held, ahead


def _clocks(
    gpus: Sequence[Sequence[GpuSpeed]], equals: Sequence[int], rank: int
) -> tuple[float, float]:
    # Mean clock of a rank's GPU, and the median clock of its other equals.
    means = [statistics.fmean(gpu.clock_mhz for gpu in own) for own in gpus]
    others = [m for r, m in enumerate(means) if equals[r] == equals[rank] and r != rank]
    return means[rank], statistics.median_high(others)


def _slower(
    factors: Sequence[Sequence[float]],
    equals: Sequence[int],
    least: Sequence[tuple[float, float]],
) -> list[float]:
    # Ratio of measured to expected time of each rank, where 1 is the median device. `least` has
    # the ratios beyond which a rank is slower and faster than equal devices. The measurements and
    # the curves have different units, so only ratios between ranks count.
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
        slower.append(_differs(own, *least[rank]) * _differs(others, _DEVIATION, _DEVIATION))
    return slower


def _differs(ratios: Sequence[float], slower: float, faster: float) -> float:
    # The median ratio, if all ratios are on one side of 1 and beyond its factor. Otherwise 1.
    is_apart = min(ratios) > slower or max(ratios) * faster < 1
    return statistics.median(ratios) if is_apart else 1.0

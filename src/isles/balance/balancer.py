"""The split of a run: the balancer measures the steps and revises the split."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from isles.balance.curve import rank_seconds, step_seconds
from isles.balance.gpus import GpuMeter, GpuSpeed, mean_gpu, slowest_gpu
from isles.balance.measure import ComputeMeter
from isles.balance.revise import (
    WINDOWS,
    Allocation,
    SplitHistory,
    equal_devices,
    gain_over_even,
    next_allocation,
    windows,
)
from isles.dist.split import RowSplit
from isles.dist.world import World

log = logging.getLogger(__name__)

_EARLY = 10
"""Steps from a new split to its first review."""

_EVERY, _SELDOM = 50, 500
"""Steps between two reviews; for a split that was replaced before and is used again."""

_EVIDENCE_S = 10.0
"""Seconds of training that a review needs for a decision. With less it is postponed. So a program
that runs on a machine for a few seconds does not affect every window."""


class Balancer:
    """The current split, with the speeds it was made for.

    Args:
        first: allocation at the start of training.
        history: decisions of `balance: auto`. It may have decisions for later steps, from an
            attempt that already ran them. None: the split is fixed.
        file: file of the history. Rank 0 writes it.
    """

    def __init__(
        self,
        world: World,
        first: Allocation,
        history: SplitHistory | None,
        file: Path,
        step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world, self._file, self._clock = world, file, clock
        self._current, self._history = first, history
        self.block_types: tuple[type[nn.Module], ...] = ()
        """Types of the modules that `watch` times."""
        self._meter: ComputeMeter | None = None
        self._gpu: GpuMeter | None = None
        self._step = step
        self._ends: list[float] = []
        """End times of the steps for the next review."""

    @property
    def split(self) -> RowSplit:
        """The current split of rows."""
        return self._current.split

    @property
    def even_size(self) -> int:
        """Micro-batch size of the even split, and of evaluation."""
        return self._current.even_size

    @property
    def is_auto(self) -> bool:
        """True if the split may be revised while training."""
        return self._history is not None

    @property
    def decided_to(self) -> int:
        """The last step whose rows are decided. Later steps are reviewed."""
        return 0 if self._history is None else self._history.decided_to

    def watch(self, blocks: list[nn.Module], gpu: GpuMeter | None = None) -> None:
        """Time these modules from now on. Call this after the strategy has added its hooks.

        Args:
            gpu: reads this rank's GPU, as evidence against equal GPUs. None: no evidence.
        """
        self._meter, self._gpu = ComputeMeter(blocks, self._world.device), gpu

    def blocks_s(self) -> float | None:
        """Seconds of the forward passes of this rank's blocks, in the last step with known times.
        None: not timed. Does not wait for a GPU."""
        steps = self._meter.steps() if self._meter is not None else []
        return steps[-1] if steps else None

    def row_s(self, dp_rank: int) -> float | None:
        """Seconds of the forward passes of this rank's blocks for one row of a step.

        None: not timed, or for less than `_EVIDENCE_S` of training. Does not wait for a GPU.
        """
        steps, rows = self._meter.steps() if self._meter is not None else [], self.split.rows
        seconds = [end - begin for begin, end in itertools.pairwise(self._ends)]
        if not steps or sum(seconds) < _EVIDENCE_S:
            return None
        return statistics.median(steps) / max(1, rows[dp_rank])

    def rest(self) -> None:
        """Keep the current split until the end. All ranks must call this."""
        self._meter = None

    def after_step(self, step: int, *, is_whole: bool = True) -> RowSplit | None:
        """The new split, or None to keep the present one. All ranks must call this after each step.

        It waits for the other ranks at reviews, and never for a GPU.

        Args:
            step: number of the step.
            is_whole: whether the step had all its rows. If not, it is ignored.
        """
        before, self._step = self._step, step
        if self._meter is not None:
            self._meter.step_done(counts=is_whole)
            self._ends.append(self._clock())
            if self._gpu is not None:
                self._gpu.step_done()
        if self._history is None:
            return None
        if step <= self._history.decided_to:
            known = self._history.at(step)
            return self._use(known) if known is not None and known != self._current else None
        if self._meter is None or not self._is_look(before, step):
            return None
        readings = self._gpu.readings() if self._gpu is not None else []
        every = self._world.gather((self._meter.steps(), readings))
        # One rank decides, so that rounding cannot lead to different decisions.
        mine = (self._decide(step, every),) if self._world.is_main else None
        (decision,) = self._world.broadcast(mine)
        if decision is None:
            return None
        self._history = decision
        chosen = decision.at(step)
        assert chosen is not None
        is_new = chosen != self._current
        split = self._use(chosen)
        return split if is_new else None

    def record(self) -> dict[str, Any] | None:
        """The history for a checkpoint."""
        return None if self._history is None else self._history.record()

    def summary(self) -> str:
        """Short description of the rows of each rank."""
        text = _rows(self.split)
        if self._current.is_timed:
            text += f", {gain_over_even(self.split, self._current.curves):.2f} times an even split"
        return text

    def table(self) -> str:
        """Table of the rows and speed of each rank."""
        current, split, curves = self._current, self.split, self._current.curves
        head = ("rank", "host", "device", "rows", "micro-batch", "rows/s", "step s")
        lines = [head]
        for rank, device in enumerate(current.devices):
            own = device.dp_rank
            speed, seconds = "-", "-"
            if current.is_timed:
                speed = f"{curves[own].rows_per_second:.1f}"
                seconds = f"{rank_seconds(split, own, curves[own]):.3f}"
            rows, size = str(split.rows[own]), str(split.micro_batch_sizes[own])
            lines.append((str(rank), device.host, device.name, rows, size, speed, seconds))
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        if current.is_timed:
            seconds, gain = f"{step_seconds(split, curves):.3f}", gain_over_even(split, curves)
            text.append(f"expected: {seconds} s per step, {gain:.2f} times an even split")
        return "\n".join(text)

    def _use(self, allocation: Allocation) -> RowSplit:
        self._current = allocation
        self._ends.clear()
        if self._meter is not None:
            self._meter.reset()
        if self._gpu is not None:
            self._gpu.reset()
        return allocation.split

    def _is_look(self, before: int, step: int) -> bool:
        # Steps are counted one by one, but with several clusters some may be skipped.
        if self._current.rests:
            return before // _SELDOM < step // _SELDOM
        early = self._current.after_step + _EARLY
        return before < early <= step or before // _EVERY < step // _EVERY

    def _decide(
        self, step: int, every: Sequence[tuple[Sequence[float], Sequence[GpuSpeed]]]
    ) -> SplitHistory | None:
        # The history with the decision at this step. None: not enough data for a decision.
        assert self._history is not None
        # Medians ignore occasional work between two steps, such as an evaluation or a checkpoint.
        steps = [end - begin for begin, end in itertools.pairwise(self._ends)]
        evidence_s = statistics.median(steps) * len(steps) if steps else 0.0
        count = min(len(of_rank) for of_rank, _ in every)
        if count < WINDOWS or evidence_s < _EVIDENCE_S:
            return None
        devices = self._current.devices
        measured = [[0.0] * WINDOWS for _ in equal_devices(devices)]
        shown: list[list[Sequence[GpuSpeed]]] = [[] for _ in measured]
        for device, (steps_of_rank, readings) in zip(devices, every, strict=True):
            # Ranks that share their rows wait for the slowest rank among them.
            own = [statistics.fmean(part) for part in windows(steps_of_rank[:count])]
            slowest = zip(measured[device.dp_rank], own, strict=True)
            measured[device.dp_rank] = [max(pair) for pair in slowest]
            if len(readings) >= WINDOWS:
                shown[device.dp_rank].append([mean_gpu(part) for part in windows(readings)])
        gpus = None
        if sum(map(len, shown)) == len(devices):
            gpus = [[slowest_gpu(part) for part in zip(*own, strict=True)] for own in shown]
        found = next_allocation(self._history, step, measured, gpus)
        history = self._history.decided(step) if found is None else self._history.add(found[0])
        try:
            history.write(self._file)
        except OSError as error:
            # Without a record, a resumed run would use other rows.
            log.warning("balance is not revised, as %s cannot be written (%s)", self._file, error)
            return None
        if found is not None:
            chosen, reason = found
            text = _rows(chosen.split)
            log.info("balance revised: %s. From step %d: %s", reason, text, step + 1)
        return history


def _rows(split: RowSplit) -> str:
    rows = split.rows
    return f"rows {' '.join(map(str, rows))}" if len(rows) <= 16 else f"{len(rows)} ranks"

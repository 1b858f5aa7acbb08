"""Holds the split of a run: what it rests on, what it gains, and when it is dealt anew."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from isles.balance.meter import ComputeMeter
from isles.balance.revise import Revision, revise
from isles.config.curve import Curve, rank_seconds, step_seconds
from isles.config.split import RowSplit, shared_split
from isles.dist.world import World

log = logging.getLogger(__name__)

REVISE_EVERY = 50
"""Steps between two looks at the ranks' speeds."""


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


class Balancer:
    """The split that is in use, and the speeds that it was made for.

    Args:
        world: all ranks.
        devices: of every rank, in order.
        split: with which training begins.
        curves: of each data-parallel rank; None where nothing was measured.
        even_size: micro-batch size of the even split, and of evaluation.
    """

    def __init__(
        self,
        world: World,
        devices: Sequence[Device],
        split: RowSplit,
        curves: Sequence[Curve] | None,
        even_size: int,
    ) -> None:
        self.split = split
        self.even_size = even_size
        self._world = world
        self._devices = tuple(devices)
        self._curves = None if curves is None else tuple(curves)
        self.block_types: tuple[type[nn.Module], ...] = ()
        """Of the modules that `watch` is to be given."""
        self._meter: ComputeMeter | None = None
        self._steps = 0

    def watch(self, blocks: list[nn.Module]) -> None:
        """Measure these modules from now on; after the strategy has put its own hooks on them."""
        if self._curves is not None:
            self._meter = ComputeMeter(blocks, self._world.device)

    def rest(self) -> None:
        """Keep the split that is in use from now on. All ranks must call this."""
        self._meter = None

    def after_step(self) -> RowSplit | None:
        """A step is over: the split to use from now on, if it is another. All ranks must call this.

        Waits for the others every REVISE_EVERY steps, and for no GPU.
        """
        if self._meter is None or self._curves is None:
            return None
        self._meter.step_done()
        self._steps += 1
        if self._steps % REVISE_EVERY:
            return None
        every = self._world.gather(self._meter.take())
        # One rank decides, so that no last bit of a division can part them.
        mine = (self._decide(every),) if self._world.is_main else None
        (revision,) = self._world.broadcast(mine)
        if revision is None:
            return None
        log.info("balance revised: %s\n%s", revision.reason, self._table(revision))
        self.split, self._curves = revision.split, revision.curves
        return self.split

    def record(self) -> dict[str, Any] | None:
        """For a checkpoint: what `before` looks at."""
        if self._curves is None:
            return None
        devices = [[device.host, device.name, device.dp_rank] for device in self._devices]
        return {"devices": devices, "curves": [curve.record() for curve in self._curves]}

    def table(self) -> str:
        """Who takes how much, one line a rank."""
        return _table(self._devices, self.split, self._curves)

    def summary(self) -> str:
        """The same in a few words."""
        rows = self.split.rows
        parts = [f"rows {' '.join(map(str, rows))}" if len(rows) <= 16 else f"{len(rows)} ranks"]
        if self._curves is not None:
            parts.append(f"{gain_over_even(self.split, self._curves):.2f} times an even split")
        return ", ".join(parts)

    def _decide(self, every: Sequence[float | None]) -> Revision | None:
        assert self._curves is not None
        measured: list[float] = [0.0] * len(self._curves)
        for device, seconds in zip(self._devices, every, strict=True):
            if seconds is None:
                return None
            # Ranks that share their rows wait for the slowest of them.
            measured[device.dp_rank] = max(measured[device.dp_rank], seconds)
        return revise(self.split, self._curves, measured, self.even_size)

    def _table(self, revision: Revision) -> str:
        return _table(self._devices, revision.split, revision.curves)


def gain_over_even(split: RowSplit, curves: Sequence[Curve]) -> float:
    """How many times as fast a step is as with even rows, by what was measured."""
    limits = [curve.limit for curve in curves]
    even = shared_split(split.global_batch_size, [1.0] * len(curves), limits, in_step=split.in_step)
    return step_seconds(even, curves) / step_seconds(split, curves)


def _table(devices: Sequence[Device], split: RowSplit, curves: Sequence[Curve] | None) -> str:
    head = ("rank", "host", "device", "rows", "micro-batch", "rows/s", "step s")
    lines = [head]
    for rank, device in enumerate(devices):
        own = device.dp_rank
        speed, seconds = "-", "-"
        if curves is not None:
            speed = f"{curves[own].rows_per_second:.1f}"
            seconds = f"{rank_seconds(split, own, curves[own]):.3f}"
        rows, size = str(split.rows[own]), str(split.micro_batch_sizes[own])
        lines.append((str(rank), device.host, device.name, rows, size, speed, seconds))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    if curves is not None:
        gain = gain_over_even(split, curves)
        text.append(
            f"expected: {step_seconds(split, curves):.3f} s a step, {gain:.2f} times an even split"
        )
    return "\n".join(text)

"""Every split that a run has used, and from which step on.

Rank 0 writes it to the run directory before a split is used, and each checkpoint holds it too. A
start that passes steps which an earlier one has done deals their rows as they were dealt then, so
that a resumed run adds the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isles.balance.curve import Curve
from isles.dist.split import RowSplit
from isles.run.records import read_record, write_record


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
class Dealt:
    """A split, and what it rests on.

    Args:
        after_step: it is used from the step after this one on.
        split: the rows.
        even_size: micro-batch size of the even split, and of evaluation.
        strategy: kind of strategy that it was made for.
        devices: of every rank, in order.
        curves: of each data-parallel rank.
        is_timed: whether the curves are in seconds; else only their ratios mean something.
        slowest_s: seconds, of what the meter measures, of the slowest rank under the split before
            it, which this one must undercut. None: it was not chosen while training.
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

    def record(self) -> dict[str, Any]:
        """For a file; `read` gives back the same."""
        return {
            "after_step": self.after_step,
            "rows": list(self.split.rows),
            "micro_batch_sizes": list(self.split.micro_batch_sizes),
            "in_step": self.split.in_step,
            "even_size": self.even_size,
            "strategy": self.strategy,
            "devices": [[device.host, device.name, device.dp_rank] for device in self.devices],
            "curves": [curve.record() for curve in self.curves],
            "is_timed": self.is_timed,
            "slowest_s": self.slowest_s,
            "rests": self.rests,
        }

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Dealt:
        """What `record` gave."""
        rows, sizes = tuple(record["rows"]), tuple(record["micro_batch_sizes"])
        return cls(
            after_step=int(record["after_step"]),
            split=RowSplit(rows, sizes, bool(record["in_step"])),
            even_size=int(record["even_size"]),
            strategy=str(record["strategy"]),
            devices=tuple(Device(*device) for device in record["devices"]),
            curves=tuple(Curve.read(curve) for curve in record["curves"]),
            is_timed=bool(record["is_timed"]),
            slowest_s=record["slowest_s"],
            rests=bool(record["rests"]),
        )


@dataclass(frozen=True, slots=True)
class History:
    """The splits of a run, in the order of their steps.

    Args:
        dealt: each is used until the next one's step.
        decided_to: the last step whose split is decided; steps up to it are not judged again.
    """

    dealt: tuple[Dealt, ...] = ()
    decided_to: int = 0

    def at(self, step: int) -> Dealt | None:
        """What is used after `step`."""
        return next((each for each in reversed(self.dealt) if each.after_step <= step), None)

    def add(self, dealt: Dealt) -> History:
        """With another one, in place of all that followed its step or was decided at it."""
        kept = tuple(each for each in self.dealt if each.after_step < dealt.after_step)
        return History((*kept, dealt), dealt.after_step)

    def going_on_after(self, step: int, fits: Callable[[Dealt], bool]) -> History | None:
        """What holds for a start after `step`; None: the split of that step does not fit."""
        now = self.at(step)
        if now is None or not fits(now):
            return None
        for each in self.dealt:
            if each.after_step > step and not fits(each):
                # From here on other ranks or devices were there, and decided nothing for these.
                kept = tuple(other for other in self.dealt if other.after_step < each.after_step)
                return History(kept, each.after_step - 1)
        return self

    def decided(self, step: int) -> History:
        """With the split in use kept up to this step."""
        return replace(self, decided_to=max(self.decided_to, step))

    def record(self) -> dict[str, Any]:
        """For a file or a checkpoint."""
        return {"dealt": [each.record() for each in self.dealt], "decided_to": self.decided_to}

    def write(self, file: Path) -> None:
        """Put it on the disk, durably.

        Raises:
            OSError: the disk is full or read-only; what was there is as it was.
        """
        write_record(file, self.record())

    @classmethod
    def load(cls, file: Path, in_checkpoint: Mapping[str, Any] | None) -> History:
        """From the run directory or, if it reaches further (on another disk), a checkpoint."""
        found = (_read(record) for record in (read_record(file), in_checkpoint))
        return max(found, key=lambda history: (len(history.dealt) > 0, history.decided_to))


def _read(record: Mapping[str, Any] | None) -> History:
    try:
        if record is not None:
            dealt = tuple(Dealt.read(each) for each in record["dealt"])
            return History(dealt, int(record["decided_to"]))
    except (KeyError, TypeError, ValueError, AssertionError):
        pass  # of another version: measured anew, and overwritten
    return History()

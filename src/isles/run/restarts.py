"""Restarts within one attempt: the failure, the lost steps, and the step to resume from."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from isles.run.checkpoints import list_checkpoints, newest_checkpoint
from isles.run.owner import read_text
from isles.run.paths import Attempt, RunDir
from isles.run.records import as_kind, read_record, write_record

Decision = Literal["restart", "stop", "fail"]
"""restart: restart all ranks. stop: end the run after a stop request. fail: end the run with an
error."""

_MOST_LISTED = 100
"""Decisions that `list_restarts` reads. Each record has the count of all before it."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The reason for an early end of the ranks, and the decision.

    Args:
        number: number of the possible restart in this attempt, from 1.
        root_cause: the error that caused it, or None if only nodes connected or disconnected.
        why: short reason, such as `rank 1 on box was killed by SIGKILL`.
        reached: the last finished step, or None if there was no step since the start of the ranks.
        saved: the step of the newest checkpoint, or None.
        count: number of restarts that count against the limit, including this one.
        is_counted: whether this restart counts. A node that connects or disconnects does not count.
        world_size: number of ranks that continue, or 0 before the rendezvous.
    """

    number: int
    at: float
    decision: Decision
    root_cause: dict[str, Any] | None
    why: str
    reached: int | None
    saved: int | None
    count: int
    max_restarts: int
    is_counted: bool
    world_size: int = 0
    is_planned: bool = False

    @property
    def text(self) -> str:
        if not self.at:
            return self.why  # the rest is unknown
        at = f" at step {self.reached}" if self.reached is not None else ""
        number = f" (restart {self.count} of {self.max_restarts})" if self.is_counted else ""
        if (self.root_cause or {}).get("is_script"):
            return f"{self.why}{at}. Restarting the script{number}"
        place = "the beginning" if self.saved is None else f"step {self.saved}"
        again = (self.reached or 0) - (self.saved or 0)
        lost = f", repeating {again} step{'s' if again > 1 else ''}" if again > 0 else ""
        ranks = f" with {self.world_size} ranks" if not self.is_counted and self.world_size else ""
        return f"{self.why}{at}. Resuming from {place}{ranks}{lost}{number}"

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text}


def record_restart(
    run_dir: RunDir,
    attempt: Attempt,
    number: int,
    why: str,
    *,
    max_restarts: int,
    decision: Decision = "restart",
    root_cause: dict[str, Any] | None = None,
    is_counted: bool = False,
    is_planned: bool = False,
    world_size: int = 0,
) -> Restart:
    """Record the decision before restart `number`, with the finished steps of the ranks.

    An existing record of this number stays, and is returned.
    """
    present = read_restart(attempt, number)
    if present is not None:
        return present
    before = last_restart(attempt)
    restart = Restart(
        number=number,
        at=time.time(),
        decision=decision,
        root_cause=root_cause,
        why=why,
        reached=read_last_step(attempt, number - 1),
        saved=newest_step(run_dir),
        count=(before.count if before is not None else 0) + is_counted,
        max_restarts=max_restarts,
        is_counted=is_counted,
        is_planned=is_planned,
        world_size=world_size,
    )
    update_restart(attempt, restart)
    return restart


def read_restart(attempt: Attempt, number: int) -> Restart | None:
    return restart_from(read_record(attempt.restart(number)))


def restart_from(record: dict[str, Any] | None) -> Restart | None:
    """A restart from a record of any version, or None if this version cannot read it."""
    with suppress(ValidationError):
        return as_kind(Restart, record)
    return None


def list_restarts(attempt: Attempt) -> list[Restart]:
    """The last hundred decisions of an attempt, oldest first.

    Only the last can differ from `restart`. An unreadable record counts as a restart.
    """
    count = num_restarts(attempt)
    return [_read(attempt, number) for number in range(1, count + 1)[-_MOST_LISTED:]]


def last_restart(attempt: Attempt) -> Restart | None:
    """The newest decision of an attempt, or None."""
    count = num_restarts(attempt)
    return _read(attempt, count) if count else None


def num_restarts(attempt: Attempt) -> int:
    """Number of decisions of an attempt, without reading them."""
    number = 0
    while os.path.lexists(attempt.restart(number + 1)):
        number += 1
    return number


def _read(attempt: Attempt, number: int) -> Restart:
    # Take the number from the file's name, as another user may have written the record.
    if (restart := read_restart(attempt, number)) is not None:
        return replace(restart, number=number)
    return Restart(
        number=number,
        at=0.0,
        decision="restart",
        root_cause=None,
        why=f"{attempt.restart(number).name} is not readable",
        reached=None,
        saved=None,
        count=number,
        max_restarts=number,
        is_counted=True,
    )


def current_restart(attempt: Attempt) -> int:
    """Number of restarts of the ranks of an attempt."""
    last = last_restart(attempt)
    # Only the last decision can differ from `restart`.
    return 0 if last is None else last.number - (last.decision != "restart")


def update_restart(attempt: Attempt, restart: Restart) -> None:
    write_record(attempt.restart(restart.number), restart.record())


def newest_step(run_dir: RunDir) -> int | None:
    """The step of the newest checkpoint, or None."""
    newest = newest_checkpoint(run_dir)
    return newest.step if newest else None


def checkpoint_to_load(
    run_dir: RunDir, attempt: Attempt, asked: Path | None, restart: int
) -> Path | None:
    """The checkpoint `asked` by the user, until this attempt has saved a checkpoint."""
    return None if restart > 0 and has_saved(run_dir, attempt) else asked


def has_saved(run_dir: RunDir, attempt: Attempt) -> bool:
    """True if this attempt has a checkpoint, by attempt number, as the clocks of hosts differ."""
    return any(info.manifest.get("attempt") == attempt.number for info in list_checkpoints(run_dir))


class LastStep:
    """Records the last step of rank 0: a few bytes in the page cache, so no step waits for a
    disk."""

    def __init__(self, path: Path, restart: int) -> None:
        self._restart = restart
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def note(self, step: int) -> None:
        with suppress(OSError):  # the next checkpoint reports a full disk
            os.pwrite(self._handle, f"{self._restart:>8} {step:>12}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._handle)


def read_last_step(attempt: Attempt, restart: int | None) -> int | None:
    """The last finished step since this restart, or since any restart for None. None without a
    step."""
    try:
        noted, step = map(int, read_text(attempt.last_step)[0].split())
    except (OSError, ValueError):
        return None
    return step if restart in (None, noted) else None

"""Restarts inside one start of a run: who died, what was lost, where it went on."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from isles.run.manifest import list_checkpoints
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record

Decision = Literal["restart", "stop", "fail"]
"""restart: all ranks are started again. stop: a stop had been asked for. fail: the run ends."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Why the ranks ended before their time, and what follows from it.

    Args:
        number: the restart that follows, or would: 1 is the first of this start of the run.
        at: seconds since the epoch.
        decision: what follows.
        culprit: the error record of whoever caused it; None where only nodes came or went.
        why: in a few words, such as `rank 1 on box was killed by SIGKILL`.
        reached: the last step that was done; None: none since the ranks were started.
        saved: the step of the newest checkpoint; None: there is none.
        count: restarts so far that count against the limit, this one included.
        max_restarts: the limit.
        is_counted: whether this one counts: a node that came or went does not.
        nodes: numbers of the nodes that go on; empty before they have met.
        world_size: ranks that go on; 0 before they have met.
    """

    number: int
    at: float
    decision: Decision
    culprit: dict[str, Any] | None
    why: str
    reached: int | None
    saved: int | None
    count: int
    max_restarts: int
    is_counted: bool
    nodes: tuple[int, ...] = ()
    world_size: int = 0

    @property
    def text(self) -> str:
        """One line that says it all."""
        at = f" at step {self.reached}" if self.reached is not None else ""
        number = f" (restart {self.count} of {self.max_restarts})" if self.is_counted else ""
        if (self.culprit or {}).get("is_script"):
            return f"{self.why}{at}; starting the script again{number}"
        place = "the beginning" if self.saved is None else f"step {self.saved}"
        again = (self.reached or 0) - (self.saved or 0)
        lost = f": {again} step{'s are' if again > 1 else ' is'} done again" if again > 0 else ""
        ranks = f" with {self.world_size} ranks" if not self.is_counted and self.nodes else ""
        return f"{self.why}{at}; going on from {place}{ranks}{lost}{number}"

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**asdict(self), "text": self.text}


def read_restart(attempt: Attempt, number: int) -> Restart | None:
    """One restart; None where there was none of this number."""
    record = read_record(attempt.restart(number))
    if record is None:
        return None
    record.pop("text", None)
    return Restart(**{**record, "nodes": tuple(record["nodes"])})


def list_restarts(attempt: Attempt) -> list[Restart]:
    """Every restart of an attempt, oldest first; the last may be none, see its decision."""
    found: list[Restart] = []
    while (restart := read_restart(attempt, len(found) + 1)) is not None:
        found.append(restart)
    return found


def current_restart(attempt: Attempt) -> int:
    """How often the ranks of an attempt were started again."""
    return sum(restart.decision == "restart" for restart in list_restarts(attempt))


def write_restart(attempt: Attempt, restart: Restart) -> Restart:
    """Put a decision on record, unless another node was first; the one on record."""
    staged = attempt.path / f".restart-{restart.number}.{os.getpid()}"
    write_record(staged, restart.record())
    try:
        # Unlike a rename, a link never replaces what is there.
        os.link(staged, attempt.restart(restart.number))
    except FileExistsError:
        return read_restart(attempt, restart.number) or restart
    finally:
        staged.unlink()
    return restart


def update_restart(attempt: Attempt, restart: Restart) -> None:
    """Replace a restart's record. Only the first of the nodes that have met calls this."""
    write_record(attempt.restart(restart.number), restart.record())


def newest_step(run_dir: RunDir) -> int | None:
    """The step of the newest checkpoint; None where there is none."""
    checkpoints = list_checkpoints(run_dir)
    return checkpoints[-1].step if checkpoints else None


def checkpoint_to_load(
    run_dir: RunDir, attempt: Attempt, asked: Path | None, restart: int
) -> Path | None:
    """A checkpoint asked for by name, until this start has saved one of its own."""
    if asked is None or restart == 0:
        return asked
    return None if has_saved(run_dir, attempt) else asked


def has_saved(run_dir: RunDir, attempt: Attempt) -> bool:
    """Whether there is a checkpoint of this start; by its number, for hosts' clocks differ."""
    return any(info.manifest.get("attempt") == attempt.number for info in list_checkpoints(run_dir))


class LastStep:
    """Notes each step that rank 0 has done, so that a death can be told in steps.

    A few bytes into the page cache: no step waits for a disk.
    """

    def __init__(self, path: Path, restart: int) -> None:
        """`restart`: how often the ranks of this attempt were started again before."""
        self._restart = restart
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def note(self, step: int) -> None:
        """This step is done."""
        with suppress(OSError):  # a full disk is for the next checkpoint to report
            os.pwrite(self._handle, f"{self._restart:>8} {step:>12}\n".encode(), 0)

    def close(self) -> None:
        """Nothing more will be noted."""
        os.close(self._handle)


def noted_step(attempt: Attempt) -> int | None:
    """The last step that was noted, since whichever restart; None where none was."""
    try:
        return int(attempt.last_step.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None


def read_last_step(attempt: Attempt, restart: int) -> int | None:
    """The last step done since a restart; None where none was."""
    try:
        noted, step = attempt.last_step.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(step) if int(noted) == restart else None

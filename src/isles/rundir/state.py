"""What a run is doing: read from its records and from the processes they name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId
from isles.rundir.records import read_record

State = Literal["new", "running", "finished", "stopped", "failed", "killed", "unknown"]
"""new: never started. killed: no outcome, and its process is gone. unknown: it was started on
another host, and nothing has been heard from there lately."""

FRESH_S = 60.0
"""A run on another host counts as running while its status is younger than this."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class AttemptState:
    """How one start of a run stands.

    Args:
        state: in one word.
        is_alive: whether its process runs, as far as this host can tell. True beside an outcome
            while the last process is still closing.
        process: who started the ranks; None where no record names it.
        begun_at: seconds since the epoch; None where it is not recorded.
        outcome: the outcome record, if there is one.
    """

    state: State
    is_alive: bool
    process: ProcessId | None
    begun_at: float | None
    outcome: dict[str, Any] | None

    @property
    def is_here(self) -> bool:
        """Whether its process belongs to this host."""
        return self.process is not None and self.process.is_here()


NEVER_STARTED = AttemptState("new", False, None, None, None)


def number_of(record: dict[str, Any] | None, key: str) -> float | None:
    """A number in a record; None where there is none."""
    value = (record or {}).get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def attempt_state(run_dir: RunDir, attempt: Attempt, now: Clock = time.time) -> AttemptState:
    """How one attempt stands now."""
    launch = read_record(attempt.launch)
    process = ProcessId.from_record(launch) if launch else None
    begun_at = number_of(launch, "begun_at")
    # The process first: it writes its outcome and then ends, never the other way round.
    is_alive = process is not None and process.is_here() and process.is_alive()
    is_fresh = not is_alive and _has_news(run_dir, begun_at, now())
    outcome = read_record(attempt.outcome)
    state: State
    if outcome is not None:
        recorded = outcome.get("state")
        state = recorded if recorded in ("finished", "stopped") else "failed"
    elif is_alive:
        state = "running"
    elif process is None or process.is_here():
        state = "killed"
    else:
        is_alive = is_fresh
        state = "running" if is_fresh else "unknown"
    return AttemptState(state, is_alive, process, begun_at, outcome)


def run_state(run_dir: RunDir, now: Clock = time.time) -> AttemptState:
    """How the newest attempt of a run stands now."""
    attempt = run_dir.last_attempt()
    return attempt_state(run_dir, attempt, now) if attempt else NEVER_STARTED


def current_status(run_dir: RunDir, begun_at: float | None) -> dict[str, Any]:
    """The status record, if it belongs to the attempt that began then; else an empty one."""
    status = read_record(run_dir.status) or {}
    updated_at = number_of(status, "updated_at")
    is_older = updated_at is None or (begun_at is not None and updated_at < begun_at)
    return {} if is_older else status


def _has_news(run_dir: RunDir, begun_at: float | None, now_s: float) -> bool:
    updated_at = number_of(read_record(run_dir.status), "updated_at")
    newest = max(updated_at or 0.0, begun_at or 0.0)
    return now_s - newest < FRESH_S

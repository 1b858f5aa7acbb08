"""State of a run, from its records and their processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isles.errors import UserError
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import MAX_LIST_BYTES, read_record

State = Literal["new", "queued", "running", "finished", "stopped", "failed", "killed", "unknown"]
"""new: never started. queued: its job waits to start or resume. killed: no outcome, and its process
is gone. unknown: it runs on another host, without a recent heartbeat."""

FRESH_S = 40.0
"""A run on another host counts as running while its last heartbeat is younger than this. Rank 0
writes one every 5 s, and a network file system may show it half a minute late."""

_FAST_S = 5.0
"""Largest difference of a clock that still counts as correct."""

QUEUES = ("slurm", "pbs", "ray")
"""Launchers that submit a job to a queue."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class AttemptState:
    """State of one attempt of a run.

    Args:
        is_alive: whether it runs or will run, as far as this host knows. Also true with an outcome,
            until the last process has ended.
        process: the process that started the ranks, or None without a record and for a queue's job.
        begun_at: start in seconds since the epoch, or None if not recorded.
        launcher: kubernetes, local, manual, pbs, ray, skypilot, slurm or ssh.
        last_seen_at: its last heartbeat in seconds since the epoch, or None.
        reason: the queue's reason why its job waits.
    """

    state: State
    is_alive: bool
    process: ProcessId | None
    begun_at: float | None
    outcome: dict[str, Any] | None
    launcher: str = "local"
    last_seen_at: float | None = None
    reason: str = ""

    @property
    def is_here(self) -> bool:
        return self.process is not None and self.process.is_here()

    @property
    def is_queue(self) -> bool:
        return self.launcher in QUEUES


NEVER_STARTED = AttemptState("new", False, None, None, None)


_LARGEST = 1e300


def number_of(record: dict[str, Any] | None, key: str) -> float | None:
    value = (record or {}).get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Refuse NaN and infinity, which json reads, and numbers that are too large for arithmetic.
    return value if -_LARGEST < value < _LARGEST else None


def text_of(record: dict[str, Any] | None, key: str) -> str:
    """A text of a record, or empty if it is missing or not text."""
    value = (record or {}).get(key)
    return value if isinstance(value, str) else ""


def attempt_state(run_dir: RunDir, attempt: Attempt, now: Clock = time.time) -> AttemptState:
    """Current state of one attempt. Correct on every machine that sees the directory."""
    launch = read_record(attempt.launch)
    launcher = text_of(launch, "launcher") or "local"
    begun_at = number_of(launch, "begun_at")
    if launcher in QUEUES:
        return _job_state(run_dir, attempt, launcher, begun_at, now())
    process = ProcessId.from_record(launch) if launch else None
    # Check the process first, as it writes its outcome before it ends.
    is_alive = process is not None and process.is_here() and process.is_alive()
    last_seen_at = _last_seen_at(run_dir, attempt, begun_at, now())
    newest = _latest([last_seen_at, begun_at], now()) or 0.0
    if last_seen_at is None and begun_at is not None and begun_at > now() + _FAST_S:
        newest = _modified_at(attempt.launch) or newest
    outcome = read_record(attempt.outcome)
    state: State
    if outcome is not None:
        state = _recorded(outcome)
    elif is_alive:
        state = "running"
    elif _is_untyped(attempt, launch):
        state, launcher = "new", "manual"
    elif run_dir.node_of.exists():
        state = "unknown"  # its first host has the record of its end
    elif process is None or process.is_here():
        state = "killed"
    else:
        is_alive = now() - newest < FRESH_S
        state = "running" if is_alive else "unknown"
    return AttemptState(state, is_alive, process, begun_at, outcome, launcher, last_seen_at)


def _is_untyped(attempt: Attempt, launch: dict[str, Any] | None) -> bool:
    # Whether it is of launcher manual and still waits for its commands: its creator has left only
    # a claim.
    fleet = read_record(attempt.fleet, MAX_LIST_BYTES) or {}
    return fleet.get("launcher") == "manual" and "launcher" not in (launch or {})


def _job_state(
    run_dir: RunDir, attempt: Attempt, launcher: str, begun_at: float | None, now_s: float
) -> AttemptState:
    # Use the heartbeats of its ranks, then the last answer of its queue.
    job = read_record(attempt.job) or {}
    word = job.get("state")
    last_seen_at = _last_seen_at(run_dir, attempt, begun_at, now_s)
    outcome = read_record(attempt.outcome)
    ended_at, asked_at = number_of(outcome, "at") or 0.0, number_of(job, "at") or 0.0
    state: State
    is_alive = True
    is_queued = word in ("pending", "requeued")
    if outcome is not None and not outcome.get("may_go_on"):
        is_queued = is_queued and asked_at > ended_at  # the scheduler may not have answered since
    waits = is_queued and asked_at > (last_seen_at or 0.0)
    seen_at = last_seen_at
    if outcome is not None:
        # A copy of a run has new file times, so compare an outcome with the records of the ranks.
        seen_at = number_of(read_record(run_dir.status), "updated_at") or seen_at
    is_seen = (
        last_seen_at is not None
        and seen_at is not None
        and now_s - last_seen_at < FRESH_S
        and seen_at > ended_at + 1.0
    )
    if is_seen and not waits:
        state = "running"  # an older outcome belongs to an earlier start of the same job
    elif is_queued:
        state = "queued"
    elif outcome is not None:
        state, is_alive = _recorded(outcome), word == "running"
    elif word == "running":
        state = "running"
    elif word == "ended":
        state, is_alive = "killed", False
    elif begun_at is not None and now_s - begun_at < FRESH_S:
        state = "queued"  # just submitted, and the queue was not queried yet
    else:
        state, is_alive = "unknown", False
    reason = text_of(job, "reason")
    return AttemptState(state, is_alive, None, begun_at, outcome, launcher, last_seen_at, reason)


def _recorded(outcome: dict[str, Any]) -> State:
    recorded = outcome.get("state")
    return recorded if recorded in ("finished", "stopped") else "failed"


def run_state(run_dir: RunDir, now: Clock = time.time) -> AttemptState:
    attempt = run_dir.last_attempt()
    return attempt_state(run_dir, attempt, now) if attempt else NEVER_STARTED


def current_status(run_dir: RunDir, begun_at: float | None) -> dict[str, Any]:
    """The status record if it belongs to the attempt with this start, or an empty record."""
    status = read_record(run_dir.status) or {}
    updated_at = number_of(status, "updated_at")
    is_older = updated_at is None or (begun_at is not None and updated_at < begun_at)
    return {} if is_older else status


def _last_seen_at(
    run_dir: RunDir, attempt: Attempt, begun_at: float | None, now_s: float
) -> float | None:
    # Use the times of the record and of its file, as one of the clocks may be slow. Compare each
    # with the start by the same clock.
    updated_at = number_of(read_record(run_dir.status), "updated_at")
    if updated_at is not None and begun_at is not None and updated_at < begun_at - 1.0:
        updated_at = None
    seen_at, since = _modified_at(run_dir.status), _modified_at(attempt.launch)
    if seen_at is not None and since is not None and seen_at < min(since, begun_at or since) - 1.0:
        seen_at = None
    return _latest([updated_at, seen_at], now_s)


def _latest(times: Sequence[float | None], now_s: float) -> float | None:
    # A time in the future comes from a fast clock. It counts as now, if it is the only time.
    known = [at for at in times if at is not None]
    past = [at for at in known if at <= now_s + _FAST_S]
    return min(max(past), now_s) if past else now_s if known else None


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def script_of(run_dir: RunDir) -> str | None:
    """The user's training script, or None for the built-in trainer."""
    status = read_record(run_dir.status)
    if status is None:  # its ranks have not started
        from isles.run.resolved import read_resolved  # slow to import, and agents do not need it

        with suppress(OSError, UserError, ValueError):
            return read_resolved(run_dir).config.training.script
    return text_of(status, "script") or None

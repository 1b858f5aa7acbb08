"""Outcome of an attempt, and the error records that explain it.

Both are dictionaries, because isles sends them between hosts and stores them as JSON. An outcome is
written once, by the first writer.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.state import script_of

AGAIN = "run `isles train` again to resume from the last checkpoint"
"""End of the fix of an error that allows the run to resume."""

ErrorRecord = dict[str, Any]

_LONGEST_WHAT, _LONGEST_TRACEBACK = 8192, 32768
"""Limit in characters. A message may list each weight of a model, and a record has a limit. See
`isles.run.records.MAX_RECORD_BYTES`. The log of the rank has the whole message."""


def error_record(
    what: str,
    *,
    id: str,
    kind: str,
    code: ExitCode,
    fix: str = "",
    where: str = "",
    rank: int | None = None,
    traceback: str | None = None,
    **more: Any,
) -> ErrorRecord:
    """Describe an error of this host for `isles status` and `isles logs`.

    Args:
        id: id for `isles explain`.
        kind: name of the exception, or of another cause.
        code: exit code of the run if this error ends it.
        where: file and line, key, or rank. Default: this host, or the rank on it.
        rank: the failed rank, or None for an agent or a launcher.
        more: `is_communication`: only a consequence of another rank's failure. `will_recur`: a
            restart would fail again. `is_script`, `restart`.
    """
    host = os.uname().nodename
    return {
        "rank": rank,
        "host": host,
        "at": time.time(),
        "kind": kind,
        "what": _shortened(what, _LONGEST_WHAT),
        "where": where or (f"host {host}" if rank is None else f"rank {rank} on {host}"),
        "fix": fix,
        "id": id,
        "exit_code": int(code),
        "is_communication": code is ExitCode.COMMUNICATION,
        "traceback": _shortened(traceback, _LONGEST_TRACEBACK) if traceback else None,
        **more,
    }


def _shortened(text: str, most_chars: int) -> str:
    # Cut the middle: the ends of a traceback are the most useful.
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    return (
        f"{text[:half]}\n... {len(text) - 2 * half:,} characters are in the log ...\n{text[-half:]}"
    )


def agent_error(
    what: str, fix: str, code: ExitCode = ExitCode.COMMUNICATION, *, id: str, **more: Any
) -> ErrorRecord:
    """Error record of an agent or of the coordinator, after which the run can restart."""
    record = error_record(what, id=id, kind="CommunicationError", code=code, fix=f"{fix}; {AGAIN}")
    return {**record, **more}


def end(
    attempt: Attempt,
    state: Literal["finished", "stopped", "failed"],
    code: ExitCode | int,
    reason: str,
    *,
    step: int | None = None,
    error: ErrorRecord | None = None,
    may_go_on: bool = False,
) -> None:
    """Write the outcome of an attempt, unless it has one.

    Args:
        state, code, reason: final state, exit code and reason.
        error: the error that ended it.
        may_go_on: the scheduler may start the same job again, which voids the outcome.

    Raises:
        OSError: the run directory is not writable.
    """
    if read_record(attempt.outcome) is not None:
        return
    record: dict[str, Any] = {"state": state, "exit_code": int(code), "step": step}
    record |= {"reason": reason, "at": time.time(), "error": error}
    write_record(attempt.outcome, record | ({"may_go_on": True} if may_go_on else {}))


def end_failed(attempt: Attempt, error: ErrorRecord, *, step: int | None = None) -> None:
    """Write that the attempt has failed with an error. See `end`."""
    code = int(error["exit_code"])
    end(attempt, "failed", code, str(error["what"]), step=step, error=error)


def end_without_agent(attempt: Attempt, error: ErrorRecord) -> None:
    """Write the outcome under a manual torchrun, without an agent that finds the root cause.

    A root cause replaces an error that follows from another rank's failure.
    """
    present = read_record(attempt.outcome)
    if present is not None and not (present.get("error") or {}).get("is_communication"):
        return
    if present is None or not error["is_communication"]:
        attempt.outcome.unlink(missing_ok=True)
        end_failed(attempt, error)


def end_stopped(attempt: Attempt, code: ExitCode, saved: int | None, lost: str = "") -> None:
    """Write that the attempt was stopped, if no rank is left to write it. See `end`.

    Args:
        lost: text about a loss before it could save.
    """
    kept = "nothing" if saved is None else f"everything up to step {saved}"
    is_script = script_of(RunDir(attempt.path.parent.parent)) is not None
    reason = f"asked to stop{lost}" + ("" if is_script else f"; {kept} is saved")
    # A user's script saves by itself, and its starter has recorded its reaction to the stop.
    reason = str((read_record(attempt.rank_record(0)) or {}).get("stop_reason") or reason)
    end(attempt, "stopped", code, reason, step=saved)

"""Outcome of an attempt, and the error records that explain it.

Both are dictionaries, since they travel between hosts and lie in files as JSON. An outcome is
written once; the first writer wins.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.state import script_of

AGAIN = "`isles train` again goes on from the last checkpoint"
"""End of the fix of an error after which the run can go on."""

ErrorRecord = dict[str, Any]

_LONGEST_WHAT, _LONGEST_TRACEBACK = 8192, 32768
"""Characters. A message may name each weight of a model, and a record has a limit; see
`isles.run.records.MAX_RECORD_BYTES`. The log of the rank has all of it."""


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
    """Describe an error of this host, as `isles status` and `isles logs` show it.

    Args:
        id: for `isles explain`.
        kind: name of the exception, or of what stands for one.
        code: exit code of the run if it ends because of this.
        where: file and line, key, or rank; left out: this host, or the rank on it.
        rank: the rank that has failed; None: an agent, or a launcher.
        more: `is_communication`: only a consequence of what happened to another rank;
            `will_recur`: starting again would change nothing; `is_script`; `restart`.
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
    # Without the middle: a traceback tells most at its ends.
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    return (
        f"{text[:half]}\n... {len(text) - 2 * half:,} characters are in the log ...\n{text[-half:]}"
    )


def agent_error(
    what: str, fix: str, code: ExitCode = ExitCode.COMMUNICATION, *, id: str, **more: Any
) -> ErrorRecord:
    """Error record of an agent or of the coordinator; the run can be started again after it."""
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
        state, code, reason: how, with which exit code, and why.
        error: what ended it.
        may_go_on: the scheduler may start the same job again; the outcome is void then.

    Raises:
        OSError: the run directory cannot be written.
    """
    if read_record(attempt.outcome) is not None:
        return
    record: dict[str, Any] = {"state": state, "exit_code": int(code), "step": step}
    record |= {"reason": reason, "at": time.time(), "error": error}
    write_record(attempt.outcome, record | ({"may_go_on": True} if may_go_on else {}))


def end_failed(attempt: Attempt, error: ErrorRecord, *, step: int | None = None) -> None:
    """Write that the attempt has failed because of an error; see `end`."""
    code = int(error["exit_code"])
    end(attempt, "failed", code, str(error["what"]), step=step, error=error)


def end_without_agent(attempt: Attempt, error: ErrorRecord) -> None:
    """Write the outcome where no agent looks for the root cause: under a torchrun typed by hand.

    An error that is a consequence of another rank's loss gives way to one that is a cause.
    """
    present = read_record(attempt.outcome)
    if present is not None and not (present.get("error") or {}).get("is_communication"):
        return
    if present is None or not error["is_communication"]:
        attempt.outcome.unlink(missing_ok=True)
        end_failed(attempt, error)


def end_stopped(attempt: Attempt, code: ExitCode, saved: int | None, lost: str = "") -> None:
    """Write that the attempt was stopped, where no rank is left that could; see `end`.

    Args:
        lost: what happened before it could save.
    """
    kept = "nothing" if saved is None else f"everything up to step {saved}"
    is_script = script_of(RunDir(attempt.path.parent.parent)) is not None
    reason = f"asked to stop{lost}" + ("" if is_script else f"; {kept} is saved")
    # A user's own script saves by itself; its starter has recorded how it took the stop.
    reason = str((read_record(attempt.rank_record(0)) or {}).get("stop_reason") or reason)
    end(attempt, "stopped", code, reason, step=saved)

"""How a rank of a user's own script ended, on record: read from its exit code and its log."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.errors import ExitCode
from isles.run.env import RankEnv
from isles.run.paths import Attempt
from isles.run.records import read_record, write_record
from isles.run.restarts import read_last_step

_TAIL_BYTES = 1 << 16
_TAIL_LINES = 30
_LOOK_S = 0.1

AT_ONCE_S = 20.0
"""An error of the script so soon after its start would only come again."""

OTHERS_S = 120.0
"""How long rank 0 waits for the others to end before it calls the run finished."""

_LOST_OTHERS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
    "NCCL",
    "TCPStore",
    "DistNetworkError",
    "DistBackendError",
    "DistStoreError",
)
"""Signs that an error is only the consequence of the loss of another rank."""

_CHAINED = (
    "another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
"""What Python writes between two tracebacks of one error."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a script's process.

    Args:
        code: its exit code; negative where a signal has ended it.
        script: its file.
        log_start: where in the rank's log this process has begun.
        took_s: how long it ran.
    """

    code: int
    script: Path
    log_start: int
    took_s: float


def error_record(attempt: Attempt, env: RankEnv, ended: Ended) -> dict[str, Any]:
    """The error record of a rank whose script has failed."""
    tail = _tail(attempt.rank_log(env.rank), ended.log_start)
    raised = _raised(tail)
    what, fix = _how(env.rank, ended)
    where = ""
    is_communication = False
    # torch may abort as Python ends after an error, with a process group that is still there.
    has_failed = ended.code > 0 or (raised is not None and ended.code == -signal.SIGABRT)
    if raised is not None and has_failed:
        message, where, tail = raised
        what = f"{ended.script.name} failed: {message}"
        is_communication = any(sign in message for sign in _LOST_OTHERS)
    step = read_last_step(attempt, env.restart)
    is_at_once = has_failed and ended.took_s < AT_ONCE_S and step is None
    return {
        **_record(env, what, fix, where),
        "kind": "ScriptFailed",
        "is_communication": is_communication,
        "will_recur": is_at_once and not is_communication,
        "traceback": "\n".join(tail[-_TAIL_LINES:]),
    }


def missing_record(env: RankEnv, script: Path) -> dict[str, Any]:
    """The error record where the script is not there."""
    what = f"there is no such script: {script.absolute()}"
    fix = "copy it to every host (clusters.sync does), or set training.script and workdir"
    record = _record(env, what, fix, "training.script")
    return {
        **record,
        "kind": "ConfigError",
        "id": "files.script",
        "exit_code": int(ExitCode.USER),
        "will_recur": True,
    }


def write_error(attempt: Attempt, env: RankEnv, error: dict[str, Any], *, by_agent: bool) -> None:
    """Put an error on record; under a torchrun, the first that is a cause is the run's outcome."""
    with suppress(OSError):  # a full disk: the log still says it
        write_record(attempt.rank_error(env.rank, env.restart), error)
        if by_agent:
            return
        there = (read_record(attempt.outcome) or {}).get("error")
        is_consequence = error["is_communication"] and attempt.outcome.exists()
        if is_consequence or (there is not None and not there.get("is_communication")):
            return
        outcome = {"state": "failed", "exit_code": error["exit_code"], "step": None}
        write_record(
            attempt.outcome,
            {**outcome, "reason": error["what"], "at": error["at"], "error": error},
        )


def write_end(
    attempt: Attempt, state: str, code: ExitCode, reason: str, record: Path | None = None
) -> None:
    """The run's outcome, unless it has ended otherwise before; into `record` where it is given."""
    if read_record(attempt.outcome) is None:
        step = read_last_step(attempt, _newest_restart(attempt))
        outcome = {"state": state, "exit_code": int(code), "step": step, "reason": reason}
        write_record(record or attempt.outcome, {**outcome, "at": time.time(), "error": None})


def wait_for_others(attempt: Attempt, env: RankEnv) -> None:
    """Until every rank's record says that it has ended; their directory is shared."""
    deadline = time.monotonic() + OTHERS_S
    missing = set(range(1, env.world_size))
    while missing and time.monotonic() < deadline and not attempt.outcome.exists():
        for rank in sorted(missing):
            if "exit_code" in (read_record(attempt.rank_record(rank)) or {}):
                missing.discard(rank)
        time.sleep(_LOOK_S)
    if missing and not attempt.outcome.exists():
        names = ", ".join(map(str, sorted(missing)))
        sys.stderr.write(f"rank 0 has ended; not waiting any longer for the end of {names}\n")


def _newest_restart(attempt: Attempt) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(attempt.last_step.read_text(encoding="ascii").split()[0])
    return 0


def _record(env: RankEnv, what: str, fix: str, where: str) -> dict[str, Any]:
    host = os.uname().nodename
    place = f"rank {env.rank} on {host}"
    return {
        "rank": env.rank,
        "host": host,
        "at": time.time(),
        "what": what,
        "where": f"{where}, {place}" if where else place,
        "fix": fix,
        "id": "script.failed",
        "exit_code": int(ExitCode.TRAINING),
        "is_communication": False,
        "restart": env.restart,
        "is_script": True,
        "traceback": None,
    }


def _how(rank: int, ended: Ended) -> tuple[str, str]:
    """What happened, and what to do, where the script has raised no error that can be read."""
    if ended.code > 0:
        return f"{ended.script.name} ended with exit code {ended.code}", ""
    name = signal.Signals(-ended.code).name
    fix = "the end of its log may say why: `isles logs`"
    if name == "SIGKILL":
        fix = "somebody killed it, or the machine ran out of memory: see `dmesg | tail`"
    return f"rank {rank} was killed by {name}", fix


def _tail(log: Path, start: int) -> list[str]:
    with suppress(OSError), log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(start, size - _TAIL_BYTES))
        return stream.read().decode("utf-8", errors="replace").splitlines()
    return []


def _raised(tail: list[str]) -> tuple[str, str, list[str]] | None:
    """The last error that was raised, the line that raised it, and its traceback; None: none."""
    heads = [i for i, line in enumerate(tail) if "Traceback (most recent call last)" in line]
    if not heads:
        return None
    lines = tail[heads[-1] :]
    first = heads[-1]
    for head in reversed(heads[:-1]):  # of the errors that it came from, too
        if not any(line.rstrip().endswith(_CHAINED) for line in tail[head:first]):
            break
        first = head
    # torch prefixes the lines of a rank with its number; the rest of a traceback is Python's own.
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in lines]
    places = [found for line in lines if (found := re.match(r'\s+File "(.+)", line (\d+)', line))]
    after = [line for line in lines[1:] if line and not line[0].isspace()]
    if not after:
        return None
    where = f"{places[-1][1]}:{places[-1][2]}" if places else ""
    return after[0].strip(), where, tail[first:]

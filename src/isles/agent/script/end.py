"""How a rank of a user's own script ended, on record: read from its exit code and its log."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isles.errors import ExitCode
from isles.run.env import RankEnv
from isles.run.outcome import ErrorRecord, error_record
from isles.run.paths import Attempt
from isles.run.restarts import read_last_step

_TAIL_BYTES = 1 << 16
_TAIL_LINES = 30

AT_ONCE_S = 20.0
"""An error of the script so soon after its start would only come again."""

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


def failed_record(attempt: Attempt, env: RankEnv, ended: Ended) -> ErrorRecord:
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
    place = f"rank {env.rank} on {os.uname().nodename}"
    return error_record(
        what,
        id="script.failed",
        kind="ScriptFailed",
        code=ExitCode.TRAINING,
        fix=fix,
        where=f"{where}, {place}" if where else place,
        rank=env.rank,
        restart=env.restart,
        is_script=True,
        is_communication=is_communication,
        will_recur=is_at_once and not is_communication,
        traceback="\n".join(tail[-_TAIL_LINES:]),
    )


def missing_record(env: RankEnv, script: Path) -> ErrorRecord:
    """The error record where the script is not there."""
    return error_record(
        f"there is no such script: {script.absolute()}",
        id="files.script",
        kind="ConfigError",
        code=ExitCode.USER,
        fix="copy it to every host (clusters.sync does), or set training.script and workdir",
        where=f"training.script, rank {env.rank} on {os.uname().nodename}",
        rank=env.rank,
        restart=env.restart,
        is_script=True,
        will_recur=True,
    )


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

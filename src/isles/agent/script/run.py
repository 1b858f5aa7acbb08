"""One rank of a user's own script: starts it, forwards stop requests, and records its end.

The agent calls `script_process` instead of the built-in trainer. No torch is needed here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from isles.agent.script.stacks import RUNNER, open_file
from isles.agent.workers import let_cause_end_first, log_to_file
from isles.config.resolve import load_resolved
from isles.errors import ExitCode
from isles.run.env import ATTEMPT, RUN_DIR, SET_BY_TORCHRUN, RankEnv
from isles.run.outcome import ErrorRecord, end, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId, die_with_parent, signal_name
from isles.run.records import write_record
from isles.run.restarts import read_last_step

_LOOK_S = 0.2
_TAIL_BYTES = 1 << 16
_TAIL_LINES = 30

_GRACE_S = 60.0
"""Longest time for a script to end after SIGTERM, if checkpoint.timeout is not set."""

AT_ONCE_S = 20.0
"""Seconds after its start within which an error of the script would only repeat."""

_GOOD_ENDS = (ExitCode.OK, ExitCode.HANDOVER, ExitCode.REQUEUE, ExitCode.INTERRUPTED)

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
"""Lines that Python writes between two tracebacks of one error."""


def script_process(run_path: Path, env: RankEnv, _resume_from: Path | None) -> int:
    """Run the script as this rank; returns the exit code."""
    run_dir = RunDir(run_path)
    attempt = run_dir.attempt(env.attempt)
    log_to_file(attempt, env)
    code = _run_script(run_dir, attempt, env)
    # If another rank has failed, the agent ended this rank, not a user.
    was_ended = code != ExitCode.OK and attempt.rank_errors(env.restart)
    if was_ended or code not in _GOOD_ENDS:
        # Not an exception: the record holds more than a traceback through torch.
        sys.stderr.flush()
        os._exit(code)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # done: there is nothing left to stop
    return code


def _run_script(run_dir: RunDir, attempt: Attempt, env: RankEnv) -> int:
    # Runs until it ends; returns OK, REQUEUE or INTERRUPTED after a stop, or an error's code.
    config = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
    script, checkpoint = str(config.training.script), config.checkpoint
    has_timeout = "timeout" in checkpoint.model_fields_set
    stop = _Stop(checkpoint.timeout if has_timeout else _GRACE_S)
    if not Path(script).is_file():
        return _failed(attempt, env, _missing(env, script))
    log_start = attempt.rank_log(env.rank).stat().st_size
    began = time.monotonic()
    # The script ends with this process by `die_with_parent`. Its child processes are killed by the
    # guard, which leads their process group and survives a kill of the agent's group.
    guard = subprocess.Popen(
        ["/bin/sh", "-c", "read line; kill -9 0"],
        stdin=subprocess.PIPE,  # never written to; closes with this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    stacks = open_file()
    arguments = [str(argument) for argument in config.training.script_args]
    child = subprocess.Popen(
        [sys.executable, "-u", str(RUNNER), str(stacks), script, *arguments],
        env={
            **os.environ,
            **SET_BY_TORCHRUN,
            RUN_DIR: str(run_dir.path.absolute()),
            ATTEMPT: str(attempt.number),
            "TORCHELASTIC_RESTART_COUNT": str(env.restart),
            "TORCHELASTIC_MAX_RESTARTS": str(config.clusters[0].max_restarts),
        },
        pass_fds=[stacks],
        process_group=guard.pid,
        preexec_fn=die_with_parent,  # noqa: PLW1509  # it makes only one system call
    )
    place = {"rank": env.rank, "restart": env.restart, "script_pid": child.pid, "stacks": stacks}
    place |= ProcessId.of(os.getpid()).record()
    write_record(attempt.rank_record(env.rank), place)  # its readers send signals: handlers first
    code = stop.wait(child)
    asked = stop.code or (ExitCode.REQUEUE if code == ExitCode.REQUEUE else None)
    if asked or code:
        os.killpg(guard.pid, signal.SIGKILL)  # with the remaining child processes of the script
    guard.kill()
    guard.wait()
    if asked is not None:
        if asked is not ExitCode.HANDOVER:
            _record_stop(attempt, env, place, stop, asked, code)
        return int(asked)
    if code:
        took_s = time.monotonic() - began
        error = failed_record(attempt, env, Path(script), code, log_start=log_start, took_s=took_s)
        return _failed(attempt, env, error)
    write_record(attempt.rank_record(env.rank), {**place, "exit_code": 0})
    return int(ExitCode.OK)


class _Stop:
    """Forwards a stop to the script: SIGTERM, and SIGKILL after the grace period."""

    def __init__(self, grace_s: float) -> None:
        """Install signal handlers. Main thread only."""
        self.code: ExitCode | None = None
        self._grace_s = grace_s
        self._is_killed = False
        # The agent sends SIGUSR2 if the ranks must restart with other nodes.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._handle)

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait until the script has ended; its exit code, negative if a signal ended it."""
        sent_at: float | None = None
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=_LOOK_S)
            now = time.monotonic()
            if self.code is not None and sent_at is None:
                sent_at = now
                child.terminate()
            elif sent_at is not None and now - sent_at > self._grace_s:
                self._is_killed = True
                child.kill()

    def reason(self, code: int) -> str:
        if self.code is None:
            return "the script asked to be restarted (exit code 85)"
        if self._is_killed:
            return (
                f"asked to stop; the script did not end within {self._grace_s:.0f} s after "
                "SIGTERM, and was killed"
            )
        if code == -signal.SIGTERM:
            return "asked to stop; the script does not handle SIGTERM, so it saved nothing"
        return f"asked to stop; the script ended with exit code {code}"

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # The first request counts, unless it was only a request to restart.
        if self.code in (None, ExitCode.HANDOVER):
            codes = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGUSR2: ExitCode.HANDOVER}
            self.code = codes.get(signal.Signals(number), ExitCode.REQUEUE)


def _record_stop(
    attempt: Attempt,
    env: RankEnv,
    place: dict[str, Any],
    stop: _Stop,
    asked: ExitCode,
    code: int,
) -> None:
    reason = stop.reason(code)
    write_record(attempt.rank_record(env.rank), {**place, "stop_reason": reason})
    # The coordinator handles a stop that the agent forwarded: the agent ends other ranks that way
    # too.
    step = read_last_step(attempt, env.restart)
    if env.rank == 0 and env.in_job and asked == ExitCode.REQUEUE:
        write_record(attempt.stopped, {"exit_code": int(asked), "step": step, "reason": reason})
    elif env.rank == 0 and (stop.code is None or env.in_job):
        end(attempt, "stopped", asked, reason, step=step)


def _failed(attempt: Attempt, env: RankEnv, error: ErrorRecord) -> int:
    code = int(error["exit_code"])
    with suppress(OSError):  # a full disk: the log still has it
        write_record(attempt.rank_error(env.rank, env.restart), error)
    let_cause_end_first(attempt, env, code)
    return code


def failed_record(
    attempt: Attempt, env: RankEnv, script: Path, code: int, *, log_start: int, took_s: float
) -> ErrorRecord:
    """Error record of a rank whose script failed, from its exit code and its log.

    Args:
        code: exit code; negative if a signal ended the script.
        log_start: offset in the rank's log where the output of this process starts.
    """
    tail: list[str] = []
    with suppress(OSError), attempt.rank_log(env.rank).open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(log_start, size - _TAIL_BYTES))
        tail = stream.read().decode("utf-8", errors="replace").splitlines()
    raised = _raised(tail)
    what, fix, where = f"{script.name} ended with exit code {code}", "", ""
    if code < 0:
        name = signal_name(-code)
        what = f"rank {env.rank} was killed by {name}"
        fix = "check the end of its log with `isles logs`"
        if name == "SIGKILL":
            fix = "it was killed, or the machine ran out of memory; run `dmesg | tail` there"
    is_communication = False
    # torch may abort as Python ends after an error, while a process group still exists.
    has_failed = code > 0 or (raised is not None and code == -signal.SIGABRT)
    if raised is not None and has_failed:
        message, where, tail = raised
        what = f"{script.name} failed: {message}"
        is_communication = any(sign in message for sign in _LOST_OTHERS)
    step = read_last_step(attempt, env.restart)
    is_at_once = has_failed and took_s < AT_ONCE_S and step is None
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


def _missing(env: RankEnv, script: str) -> ErrorRecord:
    return error_record(
        f"script not found: {Path(script).absolute()}",
        id="files.script",
        kind="ConfigError",
        code=ExitCode.USER,
        fix="copy it to every host (clusters.0.sync does that), or correct training.script or "
        "clusters.0.workdir",
        where=f"training.script, rank {env.rank} on {os.uname().nodename}",
        rank=env.rank,
        restart=env.restart,
        is_script=True,
        will_recur=True,
    )


def _raised(tail: list[str]) -> tuple[str, str, list[str]] | None:
    """The last raised error, the line that raised it, and its traceback, or None."""
    heads = [i for i, line in enumerate(tail) if "Traceback (most recent call last)" in line]
    if not heads:
        return None
    lines = tail[heads[-1] :]
    first = heads[-1]
    for head in reversed(heads[:-1]):  # also the errors that it was raised from
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

"""One rank of a user's own script: starts it, hands it signals, and records how it ended.

The agent calls `script_process` in place of the built-in trainer. No torch is needed here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from isles.agent.rank import (
    RankStart,
    let_cause_end_first,
    log_to_file,
    rank_env,
)
from isles.agent.script.end import Ended, failed_record, missing_record
from isles.agent.script.stacks import ScriptStacks
from isles.agent.script.status import ScriptStatus
from isles.agent.script.watch import ScriptWatch, print_note
from isles.config.resolve import load_resolved
from isles.config.sections.run import RunConfig
from isles.errors import ExitCode
from isles.run.env import ATTEMPT, RUN_DIR, SET_BY_TORCHRUN, RankEnv
from isles.run.outcome import ErrorRecord, end
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId, die_with_agent, die_with_parent
from isles.run.records import write_record
from isles.run.restarts import read_last_step
from isles.run.stop_request import read_stop_request

_LOOK_S = 0.2

GRACE_S = 60.0
"""How long a script may take to end after SIGTERM, where checkpoint.timeout does not say."""

_GOOD_ENDS = (ExitCode.OK, ExitCode.HANDOVER, ExitCode.REQUEUE, ExitCode.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class ScriptRank:
    """What the starter of one rank works with.

    Args:
        run_dir, attempt: where its records lie.
        env: its place among the ranks, with the number of this restart.
        config: the run file.
    """

    run_dir: RunDir
    attempt: Attempt
    env: RankEnv
    config: RunConfig

    @property
    def script(self) -> str:
        """The script, as the run file names it."""
        assert self.config.training.script is not None
        return self.config.training.script

    @property
    def arguments(self) -> list[str]:
        """What follows the script in its command line."""
        return [str(argument) for argument in self.config.training.script_args]

    @property
    def environ(self) -> dict[str, str]:
        """The variables that torchrun sets, and those that say where the records lie."""
        return {
            **os.environ,
            **SET_BY_TORCHRUN,
            RUN_DIR: str(self.run_dir.path.absolute()),
            ATTEMPT: str(self.attempt.number),
            "TORCHELASTIC_RESTART_COUNT": str(self.env.restart),
            "TORCHELASTIC_MAX_RESTARTS": str(self.config.clusters[0].max_restarts),
        }

    @property
    def grace_s(self) -> float:
        """How long it may take to end after SIGTERM."""
        checkpoint = self.config.checkpoint
        return checkpoint.timeout if "timeout" in checkpoint.model_fields_set else GRACE_S


def script_process(
    run_path: Path, attempt_number: int, _resume_from: Path | None, start: RankStart
) -> int:
    """Run the script as the rank that the environment names; the exit code."""
    die_with_agent()
    run_dir, env = RunDir(run_path), rank_env(start)
    config = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
    rank = ScriptRank(run_dir, run_dir.attempt(attempt_number), env, config)
    code = run_script(rank)
    # Where another rank has failed, it was the agent that ended this one, and not a user.
    was_ended = code != ExitCode.OK and rank.attempt.rank_errors(env.restart)
    if was_ended or code not in _GOOD_ENDS:
        # Not an exception: the record says more than a traceback through torch.
        sys.stderr.flush()
        os._exit(code)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # done: there is nothing left to stop
    return code


def run_script(rank: ScriptRank) -> int:
    """Run the script to its end, and leave the records that say how it ended.

    Returns:
        OK; REQUEUE or INTERRUPTED after a stop; the code of an error otherwise.
    """
    attempt, env = rank.attempt, rank.env
    log_to_file(attempt, env)
    stop = _Stop(rank)
    status = ScriptStatus(rank.run_dir, attempt, env, rank.script)
    path = Path(rank.script)
    if not path.is_file():
        return _failed(rank, missing_record(env, path))
    log_start = attempt.rank_log(env.rank).stat().st_size
    began = time.monotonic()
    stacks = ScriptStacks()
    child = subprocess.Popen(
        stacks.command(rank.script, rank.arguments),
        env=rank.environ,
        pass_fds=[stacks.fd, stacks.gate],
        process_group=0,
        preexec_fn=die_with_parent,  # noqa: PLW1509  # it makes one call to the kernel, no more
    )
    guard = _guard(child.pid)
    place = {"rank": env.rank, "restart": env.restart, "script_pid": child.pid}
    place |= ProcessId.of(os.getpid()).record()
    write_record(attempt.rank_record(env.rank), place)  # its readers send signals: handlers first
    stacks.open_gate()  # only now the script runs: the guard ends whatever it starts
    watch = _watch(rank, child.pid, stacks, status)
    with status.beating():
        code = stop.wait(child, watch)
    watch.close()
    stacks.close()
    guard.kill()
    guard.wait()
    asked = stop.code or (ExitCode.REQUEUE if code == ExitCode.REQUEUE else None)
    if asked or code or watch.error:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # what it has started and left behind
    if asked is ExitCode.HANDOVER:
        return int(asked)
    if asked:
        reason = stop.reason(code)
        write_record(attempt.rank_record(env.rank), {**place, "stop_reason": reason})
        # A stop that the agent has handed on is the coordinator's to judge: it also ends others so.
        step = read_last_step(attempt, env.restart)
        if env.rank == 0 and env.in_job and asked == ExitCode.REQUEUE:
            write_record(attempt.stopped, {"exit_code": int(asked), "step": step, "reason": reason})
        elif env.rank == 0 and (stop.code is None or env.in_job):
            end(attempt, "stopped", asked, reason, step=step)
        return int(asked)
    if watch.error is not None:
        return _failed(rank, watch.error)
    if code:
        ended = Ended(code, path, log_start, time.monotonic() - began)
        return _failed(rank, failed_record(attempt, env, ended))
    status.phase("finished")
    write_record(attempt.rank_record(env.rank), {**place, "exit_code": 0})
    return int(ExitCode.OK)


class _Stop:
    """Hands a stop request to the script: SIGTERM, and SIGKILL when it has had time enough."""

    def __init__(self, rank: ScriptRank) -> None:
        """Take over the signals. Main thread only."""
        self.code: ExitCode | None = None
        self._attempt = rank.attempt
        self._grace_s = rank.grace_s
        self._is_now = False
        self._told_at: float | None = None
        self._killed = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)
        # From the agent: the ranks are to begin again with other nodes.
        signal.signal(signal.SIGUSR2, self._hand_over)

    def wait(self, child: subprocess.Popen[bytes], watch: ScriptWatch) -> int:
        """Until the script has ended; its exit code, negative where a signal has ended it."""
        while True:
            try:
                return child.wait(timeout=_LOOK_S)
            except subprocess.TimeoutExpired:
                self._look(child)
                if watch.error is not None:
                    child.kill()

    def reason(self, code: int) -> str:
        """How it came to stop."""
        if self.code is None:
            return "the script asked to be started again (exit code 85)"
        if self._killed and not self._is_now:
            return (
                f"asked to stop; the script had not ended {self._grace_s:.0f} s after SIGTERM, and "
                "was killed"
            )
        if self._is_now:
            return "stopped at once"
        if code == -signal.SIGTERM:
            return "asked to stop; the script does not handle SIGTERM, and saved nothing for it"
        return f"asked to stop; the script ended with exit code {code}"

    def _look(self, child: subprocess.Popen[bytes]) -> None:
        request = read_stop_request(self._attempt)
        if request is not None:
            is_requeue = request.kind == "save"
            self._ask(ExitCode.REQUEUE if is_requeue else ExitCode.INTERRUPTED)
            self._is_now = request.kind == "now"
        if self.code is None:
            return
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
            child.terminate()
        if not self._killed and (self._is_now or now - self._told_at > self._grace_s):
            self._killed = True
            child.kill()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        interrupted = number == signal.SIGINT
        self._ask(ExitCode.INTERRUPTED if interrupted else ExitCode.REQUEUE)

    def _hand_over(self, _number: int, _frame: FrameType | None) -> None:
        self._ask(ExitCode.HANDOVER)

    def _ask(self, code: ExitCode) -> None:
        """The first request counts, unless it was only to begin again."""
        if self.code in (None, ExitCode.HANDOVER):
            self.code = code


def _watch(rank: ScriptRank, pid: int, stacks: ScriptStacks, status: ScriptStatus) -> ScriptWatch:
    def note(text: str) -> None:
        print_note(text)
        status.note(text)

    watchdog = rank.config.watchdog
    return ScriptWatch(rank.run_dir, rank.attempt, rank.env, watchdog, pid, stacks, note)


def _failed(rank: ScriptRank, error: ErrorRecord) -> int:
    code = int(error["exit_code"])
    with suppress(OSError):  # a full disk: the log still says it
        write_record(rank.attempt.rank_error(rank.env.rank, rank.env.restart), error)
    let_cause_end_first(rank.attempt, rank.env, code)
    return code


def _guard(group: int) -> subprocess.Popen[bytes]:
    """A process that kills this group when the present process is killed.

    The script itself ends then by `_die_with_parent`, what it has started would not. The guard is
    in a session of its own, so that it outlives whoever kills the agent's group.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read line; kill -9 "-$1"', "sh", str(group)],
        stdin=subprocess.PIPE,  # never written to: it closes with this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

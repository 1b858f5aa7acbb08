"""The process of one rank, as the agent's fork server forks it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from isles.errors import ExitCode
from isles.run.env import RankEnv, read_rank_env
from isles.run.paths import Attempt, RunDir
from isles.run.process import die_with_agent
from isles.run.records import read_record


@dataclass(frozen=True, slots=True)
class RankStart:
    """What an agent tells its ranks at each start of them.

    Args:
        restart: how often all ranks were started again before.
        store: a fresh file through which the ranks of one node find one another.
        meeting: host and port of the store through which those of several nodes do.
        in_job: whether the job of the run may be queued again after a stop: the run goes on then,
            so that rank 0 leaves no outcome.
    """

    restart: int
    store: Path | None
    meeting: tuple[str, int] | None
    in_job: bool = False


_CAUSE_FIRST_S, _LOOK_S = 2.0, 0.05


def rank_process(
    run_path: Path, attempt_number: int, resume_from: Path | None, start: RankStart
) -> int:
    """Train as the rank that the environment names, with a log of its own; the exit code."""
    die_with_agent()
    env = rank_env(start)
    run_dir = RunDir(run_path)
    attempt = run_dir.attempt(attempt_number)
    log_to_file(attempt, env)
    # By its name: the control wing never imports the worker wing, and this process is a rank now.
    worker = importlib.import_module("isles.train.worker")
    code = int(worker.run_rank(run_dir, attempt, env, resume_from))
    if code not in (ExitCode.OK, ExitCode.HANDOVER, ExitCode.REQUEUE, ExitCode.INTERRUPTED):
        let_cause_end_first(attempt, env, code)
        # Not an exception: the rank's own record says more than a traceback through torch.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # Done: only rank 0 may still be exporting, and nothing is left to save here.
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    return code


def rank_env(start: RankStart) -> RankEnv:
    """This process' place among the ranks."""
    env = replace(read_rank_env(), restart=start.restart, in_job=start.in_job)
    return replace(env, store=start.store, meeting=start.meeting)


def log_to_file(attempt: Attempt, env: RankEnv) -> None:
    """From now on all that this process prints goes to the rank's log."""
    handle = os.open(attempt.rank_log(env.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    if env.restart:
        sys.stderr.write(f"---- restart {env.restart} ----\n")
        sys.stderr.flush()


def let_cause_end_first(attempt: Attempt, env: RankEnv, code: int) -> None:
    """A rank that has only lost another one waits a moment before it ends.

    Whoever has started the ranks ends them all at the first end that it sees, which must be that of
    the cause, unless the cause has left word of itself. One that was killed leaves none.

    Args:
        attempt: where the ranks leave word.
        env: of this rank.
        code: with which it ends; all there is where its own record found no room on the disk.
    """
    mine = read_record(attempt.rank_error(env.rank, env.restart))
    has_lost_another = code == ExitCode.COMMUNICATION if mine is None else mine["is_communication"]
    if not has_lost_another:
        return
    end = time.monotonic() + _CAUSE_FIRST_S
    while time.monotonic() < end:
        errors = (read_record(path) for path in attempt.rank_errors(env.restart))
        if any(not error.get("is_communication", True) for error in errors if error is not None):
            return
        time.sleep(_LOOK_S)

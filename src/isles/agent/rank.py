"""The process of one rank, as the agent's fork server forks it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path

from isles.errors import ExitCode
from isles.run.env import read_rank_env
from isles.run.paths import RunDir
from isles.agent.rank_edges import let_cause_end_first, log_to_file


@dataclass(frozen=True, slots=True)
class RankStart:
    """What an agent tells its ranks at each start of them.

    Args:
        restart: how often all ranks were started again before.
        store: a fresh file through which the ranks of one node find one another.
        meeting: host and port of the store through which those of several nodes do.
    """

    restart: int
    store: Path | None
    meeting: tuple[str, int] | None


def rank_process(
    run_path: Path, attempt_number: int, resume_from: Path | None, start: RankStart
) -> int:
    """Train as the rank that the environment names, with a log of its own; the exit code."""
    die_with_agent()
    env = replace(read_rank_env(), restart=start.restart, store=start.store, meeting=start.meeting)
    run_dir = RunDir(run_path)
    attempt = run_dir.attempt(attempt_number)
    log_to_file(attempt, env)
    from isles.train.worker import run_rank

    code = run_rank(run_dir, attempt, env, resume_from)
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


def die_with_agent() -> None:
    """A rank whose agent was killed must not go on alone.

    The agent is not the parent process, the fork server is, and that one lives as long as any rank
    does; so a thread waits for the agent's end.
    """
    agent = multiprocessing.parent_process()
    if agent is None:
        return

    def watch() -> None:
        connection.wait([agent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="agent-watch", daemon=True).start()

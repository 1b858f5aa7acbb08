"""A rank that the script of a job has started: its end, and what torchrun is told."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from isles.errors import ExitCode
from isles.run.env import RankEnv
from isles.run.paths import Attempt
from isles.agent.rank_edges import let_cause_end_first

_LOOK_S = 0.5


def ending_record(attempt: Attempt, env: RankEnv, code: ExitCode | int) -> Path:
    """Where rank 0 writes how the run has ended.

    A job whose ranks have saved may be queued again: its script decides, and until then the run
    has no outcome.
    """
    return attempt.stopped if env.in_job and code == ExitCode.REQUEUE else attempt.outcome


def exit_status(attempt: Attempt, env: RankEnv, code: int) -> int:
    """What this rank tells torchrun, which ends all ranks at the first that is not 0."""
    if code in (ExitCode.OK, ExitCode.REQUEUE, ExitCode.INTERRUPTED):
        return 0  # the records say which
    let_cause_end_first(attempt, env, code)
    return code


def die_with_torchrun() -> None:
    """A rank whose torchrun was killed must not go on alone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="torchrun-watch", daemon=True).start()

"""A rank that the script of a job has started: its log, its end, and what torchrun is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from isles.errors import ExitCode
from isles.rundir.env import RankEnv
from isles.rundir.paths import Attempt
from isles.rundir.records import read_record

_LOOK_S = 0.5
_CAUSE_FIRST_S = 2.0
"""How long a rank that has only lost another waits, so that the other is seen to end first."""


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
    error = read_record(attempt.rank_error(env.rank, env.restart))
    if error is not None and error["is_communication"]:
        time.sleep(_CAUSE_FIRST_S)
    return code


def log_to_file(attempt: Attempt, env: RankEnv) -> None:
    """From now on all that this process prints goes to the rank's log."""
    handle = os.open(attempt.rank_log(env.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    if env.restart:
        sys.stderr.write(f"---- restart {env.restart} ----\n")


def die_with_torchrun() -> None:
    """A rank whose torchrun was killed must not go on alone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="torchrun-watch", daemon=True).start()

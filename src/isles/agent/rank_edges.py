"""Both edges of a rank's process, whoever has started it: its log, and whose end is seen first."""

from __future__ import annotations

import os
import sys
import time

from isles.errors import ExitCode
from isles.run.env import RankEnv
from isles.run.paths import Attempt
from isles.run.records import read_record

_CAUSE_FIRST_S, _LOOK_S = 2.0, 0.05


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

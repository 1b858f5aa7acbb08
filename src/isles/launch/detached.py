"""A process that outlives the terminal and the command that has started it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from isles.errors import UserError


def start_detached(
    command: Sequence[str], environ: Mapping[str, str], log: IO[bytes], where: Path
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which prints into a log.

    Args:
        command: its words.
        environ: all of its environment.
        log: takes what it prints.
        where: the folder of what it is for, for messages.

    Raises:
        UserError: the machine cannot start a process.
    """
    try:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(
            f"the run cannot be started: {error.strerror or error}",
            where=str(error.filename or where),
            fix="make room for a new process or file on this machine, then start again",
        ) from error

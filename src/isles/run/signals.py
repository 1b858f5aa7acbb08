"""Signals to recorded processes: a reused pid is never touched."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from isles.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isles.run.process import ProcessId


def send_signal(process: ProcessId, signum: signal.Signals) -> bool:
    """Send a signal to one process of this host; False where it has ended.

    Raises:
        UserError: the process belongs to another user.
    """
    try:
        with _held(process) as handle:
            if handle is None:
                return False
            if handle >= 0:
                signal.pidfd_send_signal(handle, signum)
            else:
                os.kill(process.pid, signum)
            return True
    except ProcessLookupError:
        return False  # it ended between the look and the signal
    except PermissionError as error:
        raise _foreign(process) from error


def kill_now(process: ProcessId) -> bool:
    """End a process, and the group that it leads, at once; False where it has ended.

    Raises:
        UserError: the process belongs to another user.
    """
    try:
        with _held(process) as handle:
            if handle is None:
                return False
            # A process that leads no group of its own was started by hand: only itself then.
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(process.pid, signal.SIGKILL)
            return True
    except ProcessLookupError:
        return False  # it ended between the look and the signal
    except PermissionError as error:
        raise _foreign(process) from error


@contextmanager
def _held(process: ProcessId) -> Iterator[int | None]:
    """A handle to the process while it is certainly the recorded one; None where it has ended.

    With a pidfd (Linux) the pid cannot change hands between the look and the signal; elsewhere
    the handle is -1.
    """
    handle = -1
    try:
        if hasattr(os, "pidfd_open"):
            handle = os.pidfd_open(process.pid)
    except OSError:
        handle = -1  # gone, or a kernel without pidfd: the look below decides
    try:
        yield handle if process.is_here() and process.is_alive() else None
    finally:
        if handle >= 0:
            os.close(handle)


def _foreign(process: ProcessId) -> UserError:
    return UserError(
        f"process {process.pid} belongs to another user",
        where=f"host {process.host}",
        fix="ask the user who started the run, or the administrator",
    )

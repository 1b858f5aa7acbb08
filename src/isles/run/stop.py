"""Stopping a run: requests in its directory, and signals to its processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Literal

import psutil

from isles.errors import UserError
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import read_record, write_record

StopKind = Literal["save", "interrupt", "now"]
"""save: save, and end with 85. interrupt: save, and end with 130. now: end without saving."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A stop request from any machine. `at`: seconds since the epoch."""

    kind: StopKind
    by: str
    at: float


def request_stop(attempt: Attempt, kind: StopKind) -> None:
    """Ask an attempt to stop; a stronger request (now) replaces a weaker one, but not the reverse.

    Raises:
        OSError: the attempt's folder is not writable, or is a link, perhaps to another run.
    """
    if attempt.path.is_symlink() or attempt.path.parent.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(attempt.path))
    present = read_stop_request(attempt)
    if present is not None and present.kind == "now":
        return
    by = f"process {os.getpid()} on {socket.gethostname()}"
    write_record(attempt.stop_request, {"kind": kind, "by": by, "at": time.time()})


def read_stop_request(attempt: Attempt) -> StopRequest | None:
    """The stop request of an attempt, or None."""
    record = read_record(attempt.stop_request)
    if record is None or record.get("kind") not in ("save", "interrupt", "now"):
        return None
    return StopRequest(record["kind"], str(record.get("by", "")), float(record.get("at", 0.0)))


def send_signal(process: ProcessId, signum: signal.Signals, *, to_group: bool = False) -> bool:
    """Send a signal to one process of this host. Returns False if it has ended.

    Args:
        to_group: also send it to the process group, if the process leads one.

    Raises:
        UserError: another user owns the process or its record.
    """
    if not (process.is_here() and process.is_alive()):
        return False
    if not process.is_own:
        raise UserError(
            f"process {process.pid} is only in a record of another user",
            where=f"host {process.host}",
            fix="ask the user who started the run, or the administrator",
            id="run.foreign",
        )
    try:
        # A process that leads no group was started manually, so signal only the process.
        if to_group and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signum)
        else:
            psutil.Process(process.pid).send_signal(signum)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False  # it ended between the check and the signal
    except (psutil.AccessDenied, PermissionError) as error:
        raise UserError(
            f"process {process.pid} belongs to another user",
            where=f"host {process.host}",
            fix="ask the user who started the run, or the administrator",
        ) from error
    return True


def kill_now(process: ProcessId) -> bool:
    """Kill a process and its group immediately. See `send_signal`."""
    return send_signal(process, signal.SIGKILL, to_group=True)

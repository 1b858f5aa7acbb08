"""Processes with an identity, so that isles never mistakes a reused pid for the old process."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from isles.run.owner import OwnRecord

_PIDS = 2**31


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process on one host, for as long as it lives.

    Args:
        started: start time by the kernel, seconds since the epoch.
        is_own: whether isles may send it a signal. Another user's record may name any process.
    """

    host: str
    pid: int
    started: float
    is_own: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The current process with this pid.

        Raises:
            psutil.NoSuchProcess: it does not exist.
        """
        return cls(socket.gethostname(), pid, psutil.Process(pid).create_time(), is_own=True)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ProcessId | None:
        """From a launch or rank record, or None if the record has no process."""
        try:
            place = str(record["host"]), int(record["pid"]), float(record["started"])
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None
        if not 0 < place[1] < _PIDS:
            return None  # for the kernel, these numbers mean process groups or all processes
        return cls(*place, is_own=isinstance(record, OwnRecord))

    def record(self) -> dict[str, Any]:
        return {"host": self.host, "pid": self.pid, "started": self.started}

    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def is_me(self) -> bool:
        """True if it is the calling process."""
        return self.is_here() and self.pid == os.getpid()

    def is_alive(self) -> bool:
        """True if it still runs. Only meaningful on its own host."""
        try:
            process = psutil.Process(self.pid)
            # psutil derives the time from the boot time in whole seconds, which a correction of
            # the clock moves by one.
            same = abs(process.create_time() - self.started) < 2.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Handle signals with this handler within a block. Main thread only.

    An ignored signal stays ignored, so that nohup works. Programs started within the block inherit
    SIG_IGN.
    """
    before = {}
    try:
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def signal_name(number: int) -> str:
    """Name of a signal, such as `SIGKILL`, or the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def processor_name() -> str:
    """The processor's model, from the kernel."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        models = (line.partition(":")[2].strip() for line in lines if "model name" in line)
        if name := next(models, ""):
            return name
    return platform.processor() or platform.machine()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this signal to this process when its parent ends. Linux only.

    The parent is the thread that has started this process, so it must live as long as the process.
    The kernel sends no signal for a parent that ended before this call. If the parent called this
    function before it forked this process, this call finds its absence and sends the signal.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    global _caller  # noqa: PLW0603  # what a forked process knows of its parent
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if _caller not in (None, os.getpid()) and os.getppid() != _caller:
        os.kill(os.getpid(), number)
    _caller = os.getpid()


_caller: int | None = None
"""The last caller of `die_with_parent`. In a forked process, it is the parent."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork

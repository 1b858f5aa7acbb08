"""Signals to `isles train`, kept until it looks at them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ORDERS = {"interrupt": signal.SIGINT, "requeue": signal.SIGTERM}
"""What another machine may say on stdin, and the signal that means the same."""


class Inbox:
    """Signals that have arrived and are not dealt with yet."""

    def __init__(self) -> None:
        """Empty."""
        self._arrived: list[signal.Signals] = []

    def put(self, signum: int, frame: FrameType | None = None) -> None:
        """The signal handler."""
        self._arrived.append(signal.Signals(signum))

    def take(self) -> list[signal.Signals]:
        """All that have arrived since the last call."""
        taken = []
        while self._arrived:
            taken.append(self._arrived.pop(0))
        return taken


@contextmanager
def caught_signals() -> Iterator[Inbox]:
    """Ctrl+C, SIGTERM and SIGHUP go into an inbox; open it before the run is started.

    A signal that is ignored already stays so: nohup works.
    """
    inbox = Inbox()
    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            before[signum] = signal.signal(signum, inbox.put)
    try:
        yield inbox
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

"""Signals to a command that follows a run, kept until it looks at them."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WORDS = {signal.SIGINT: "interrupt", signal.SIGTERM: "requeue"}
"""What isles on another machine reads from stdin in place of a signal."""


class Signals:
    """Signals that have arrived and are not dealt with yet."""

    def __init__(self) -> None:
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

    def read_words(self) -> None:
        """Take words of stdin for signals, in a thread; its end means that nobody follows."""

        def read() -> None:
            for line in sys.stdin:
                for number, word in WORDS.items():
                    if line.strip() == word:
                        self.put(number)
            self.put(signal.SIGHUP)

        threading.Thread(target=read, daemon=True).start()


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Catch Ctrl+C, SIGTERM and SIGHUP; to be opened before the run is started.

    A signal that is ignored already stays so: nohup works.
    """
    signals = Signals()
    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            before[signum] = signal.signal(signum, signals.put)
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

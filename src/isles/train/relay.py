"""Signals to the agent, handed on to the ranks of the moment."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from isles.errors import ExitCode
from isles.rundir.paths import Attempt
from isles.rundir.process import ProcessId
from isles.rundir.records import read_record
from isles.rundir.signals import send_signal


class StopBetween(BaseException):
    """A stop was asked for while no rank was there to take it."""


class SignalRelay:
    """Hands SIGINT, SIGTERM and SIGUSR1 to every rank, also to one that is still starting."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._restart = 0
        self._waiting: set[int] = set()
        self._number = 0
        self._is_between = False

    @property
    def requested(self) -> ExitCode | None:
        """The exit code that a stop was asked for with; None while nobody has asked."""
        if not self._number:
            return None
        return ExitCode.INTERRUPTED if self._number == signal.SIGINT else ExitCode.REQUEUE

    def install(self) -> None:
        """Take over the signals. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def expect(self, restart: int, ranks: Iterable[int]) -> None:
        """These ranks are being started; records from before this restart are not theirs."""
        # The set last: the thread below looks at the records only for what it holds.
        self._waiting = set()
        self._restart = restart
        self._waiting = set(ranks)

    @contextmanager
    def between_ranks(self) -> Iterator[None]:
        """While no rank is there, a stop raises StopBetween. Main thread only."""
        self._waiting = set()
        self._is_between = True
        try:
            if self._number:
                raise StopBetween
            yield
        finally:
            self._is_between = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_first = self._number == 0
        self._number = number
        if is_first:
            threading.Thread(target=self._hand_on, daemon=True).start()
        if self._is_between:
            raise StopBetween

    def _hand_on(self) -> None:
        # A rank writes its record once it can take a signal; until then the signal waits here.
        while True:
            waiting, restart = self._waiting, self._restart
            for rank in sorted(waiting):
                record = read_record(self._attempt.rank_record(rank)) or {}
                process = ProcessId.from_record(record)
                if process is not None and record.get("restart") == restart:
                    send_signal(process, signal.Signals(self._number))
                    waiting.discard(rank)
            time.sleep(0.05)

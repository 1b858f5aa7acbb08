"""Signals to the agent, handed on to the ranks of the moment, or to the head of the run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from isles.errors import ExitCode
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.signals import send_signal


class StopBetween(BaseException):
    """A stop was asked for while no rank was there to take it."""


class SignalRelay:
    """Hands SIGINT, SIGTERM and SIGUSR1 to every rank, also to one that is still starting."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: tuple[int, ...] = ()
        """The ranks of this node now, or those that it had last."""
        self._attempt = attempt
        self._restart = 0
        self._waiting: set[int] = set()
        self._number = 0
        self._is_between = False
        self._is_member = False
        self._stop_signal = 0

    @property
    def requested(self) -> ExitCode | None:
        """The exit code that a stop was asked for with; None while nobody has asked."""
        if not self._number:
            return None
        return ExitCode.INTERRUPTED if self._number == signal.SIGINT else ExitCode.REQUEUE

    @property
    def stop_signal(self) -> int:
        """The signal that has come to the agent of one node of several; SIGKILL: stop at once."""
        return self._stop_signal

    @property
    def stop_code(self) -> ExitCode:
        """The exit code of an agent that stops before the run has begun for it."""
        return ExitCode.REQUEUE if self._stop_signal == signal.SIGTERM else ExitCode.INTERRUPTED

    def install(self, *, is_member: bool = False) -> None:
        """Take over the signals. Main thread only.

        Args:
            is_member: of a run on several nodes: a signal is a request, which the head takes to
                all nodes; else the ranks here get it.
        """
        self._is_member = is_member
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def expect(self, restart: int, ranks: Iterable[int]) -> None:
        """These ranks are being started; records from before this restart are not theirs."""
        # The set last: the thread below looks at the records only for what it holds.
        self.ranks = tuple(ranks)
        self._waiting = set()
        self._restart = restart
        self._waiting = set(self.ranks)

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
        if self._is_member:
            again = number == signal.SIGINT and self._stop_signal == signal.SIGINT
            self._stop_signal = int(signal.SIGKILL) if again else number
            return
        self.hand_on(number)

    def hand_on(self, number: int) -> None:
        """Let every rank have this signal, also one that is still starting."""
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

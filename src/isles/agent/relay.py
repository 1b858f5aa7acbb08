"""Signals to an agent: reported to the coordinator, and handed on to the ranks when it says so."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType

from isles.errors import ExitCode
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.signals import send_signal


class SignalRelay:
    """Keeps the last signal to this agent, and hands signals on to its ranks."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: tuple[int, ...] = ()
        """The ranks of this node now, or those that it had last."""
        self._attempt = attempt
        self._restart = 0
        self._waiting: set[int] = set()
        self._handed_on = 0
        self.stop_signal = 0
        """Signal that has come to this agent: SIGINT, SIGTERM, SIGUSR1; SIGKILL: stop at once."""

    @property
    def stop_code(self) -> ExitCode:
        """Exit code of an agent that stops before the run has begun for it."""
        return ExitCode.INTERRUPTED if self.stop_signal == signal.SIGINT else ExitCode.REQUEUE

    def install(self) -> None:
        """Take over the signals: each is a request, which the coordinator takes to all nodes.

        Main thread only. The second SIGINT means at once. The end of a terminal means nothing.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def expect(self, restart: int, ranks: Iterable[int]) -> None:
        """These ranks are being started; records from before this restart are not theirs."""
        # The set last: the thread below looks at the records only for what it holds.
        self.ranks = tuple(ranks)
        self._waiting = set()
        self._restart = restart
        self._waiting = set(self.ranks)

    def hand_on(self, number: int) -> None:
        """Let every rank have this signal, also one that is still starting."""
        is_first = self._handed_on == 0
        self._handed_on = number
        if is_first:
            threading.Thread(target=self._hand_on, daemon=True).start()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self.stop_signal == signal.SIGINT
        self.stop_signal = int(signal.SIGKILL) if again else number

    def _hand_on(self) -> None:
        # A rank writes its record once it can take a signal; until then the signal waits here.
        while True:
            waiting, restart = self._waiting, self._restart
            for rank in sorted(waiting):
                record = read_record(self._attempt.rank_record(rank)) or {}
                process = ProcessId.from_record(record)
                if process is not None and record.get("restart") == restart:
                    send_signal(process, signal.Signals(self._handed_on))
                    waiting.discard(rank)
            time.sleep(0.05)

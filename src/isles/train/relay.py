"""Signals to the agent, handed on to the ranks."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from isles.rundir.paths import Attempt
from isles.rundir.process import ProcessId
from isles.rundir.records import read_record
from isles.rundir.signals import send_signal


class SignalRelay:
    """Hands SIGINT, SIGTERM and SIGUSR1 to every rank, also to one that is still starting."""

    def __init__(self, attempt: Attempt, world_size: int) -> None:
        self._attempt = attempt
        self._waiting = set(range(world_size))
        self._number = 0

    def install(self) -> None:
        """Take over the signals. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_first = self._number == 0
        self._number = number
        if is_first:
            threading.Thread(target=self._hand_on, daemon=True).start()

    def _hand_on(self) -> None:
        # A rank writes its record once it can take a signal; until then the signal waits here.
        while self._waiting:
            for rank in sorted(self._waiting):
                record = read_record(self._attempt.rank_record(rank))
                process = ProcessId.from_record(record) if record else None
                if process is not None:
                    send_signal(process, signal.Signals(self._number))
                    self._waiting.discard(rank)
            time.sleep(0.05)

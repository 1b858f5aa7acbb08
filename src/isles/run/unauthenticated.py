"""Limits for connections that have not shown the run's token yet: their number and their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")

MOST = 64
"""A client shows its token within milliseconds."""
WITHIN_S = 10.0


class Unauthenticated(Generic[C]):
    """Unauthenticated connections of one server, oldest first. Any thread may call.

    Args:
        end: ends a connection; called for the oldest above the limit, and by `look`.
        most: connections that may wait at a time.
        within_s: time in which a connection must show its token, seconds.
        clock: a monotonic clock, seconds.
    """

    def __init__(
        self,
        end: Callable[[C], None],
        *,
        most: int = MOST,
        within_s: float = WITHIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._most, self._within_s, self._clock = end, most, within_s, clock
        self._since: dict[C, float] = {}
        self._lock = threading.Lock()

    def add(self, connection: C) -> None:
        """Add a new connection; above the limit, end the oldest."""
        oldest = None
        with self._lock:
            self._since[connection] = self._clock()
            if len(self._since) > self._most:
                oldest = next(iter(self._since))
                del self._since[oldest]
        if oldest is not None:
            self._end(oldest)

    def forget(self, connection: C) -> bool:
        """Remove a connection: it has shown its token or closed. Returns whether it was waiting."""
        with self._lock:
            return self._since.pop(connection, None) is not None

    def look(self) -> None:
        """End the connections that have waited too long."""
        now = self._clock()
        with self._lock:
            late = [c for c, since in self._since.items() if now - since > self._within_s]
            for connection in late:
                del self._since[connection]
        for connection in late:
            self._end(connection)

"""Counts the lines of one kind within a minute, so that a log or terminal stays readable."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

_PER_S = 60.0
_MOST_KEYS = 10_000


class Repeats:
    """Counts equal events within a minute.

    Args:
        clock: clock in seconds. If the clock steps back, a new minute begins.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[Hashable, tuple[float, int]] = {}  # oldest minute first

    def count(self, key: Hashable) -> int:
        """Count an event. Returns 1 for the first event of a minute."""
        now = self._clock()
        since, number = self._known.get(key, (now, 0))
        if not 0 <= now - since < _PER_S:
            since, number = now, 0
            del self._known[key]
        self._known[key] = since, number + 1
        if len(self._known) > _MOST_KEYS:
            del self._known[next(iter(self._known))]
        return number + 1


class FewLines(logging.Filter):
    """Drops log lines above a number per minute, for each line of code that logs."""

    def __init__(self, most: int, repeats: Repeats | None = None) -> None:
        super().__init__()
        self._most, self._repeats = most, repeats or Repeats()

    def filter(self, record: logging.LogRecord) -> bool:
        number = self._repeats.count((record.pathname, record.lineno))
        if number == self._most:
            record.msg = f"{record.getMessage()} (isles drops similar lines in this minute)"
            record.args = ()
        return number <= self._most

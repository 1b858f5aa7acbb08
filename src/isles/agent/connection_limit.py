"""Those at the supervisor's door who are not known: how many at once, and what the log says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from isles.facts.text import printable
from isles.run.wire import Wire

_AT_ONCE = 64
"""So many connections may be without a greeting; a node's comes within milliseconds."""

_LINES, _LINE_EVERY_S = 20, 10.0
"""So many lines are said of them at once, and one more after so long."""

_LONGEST = 400


class ConnectionLimit:
    """Keeps their number small and their words harmless.

    Args:
        say: takes a line for the log.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._waiting: dict[Wire, None] = {}
        self._lines = float(_LINES)
        self._said_at = time.monotonic()
        self._unsaid = 0

    def come(self, wire: Wire) -> None:
        """One more has come; where there are too many, the one that is silent longest goes."""
        with self._lock:
            self._waiting[wire] = None
            oldest = next(iter(self._waiting)) if len(self._waiting) > _AT_ONCE else None
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            oldest.hang_up()

    def greeted(self, wire: Wire) -> None:
        """This one has said something, or has gone."""
        with self._lock:
            self._waiting.pop(wire, None)

    def tell(self, line: str) -> None:
        """Say a line that may hold words of theirs; not every one, where they are many."""
        with self._lock:
            now = time.monotonic()
            self._lines = min(_LINES, self._lines + (now - self._said_at) / _LINE_EVERY_S)
            self._said_at = now
            if self._lines < 1.0:
                self._unsaid += 1
                return
            self._lines -= 1.0
            unsaid, self._unsaid = self._unsaid, 0
        more = f" (and {unsaid} more like it before)" if unsaid else ""
        self._say(printable(line, keep="", longest=_LONGEST) + more)

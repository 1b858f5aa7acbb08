"""A tracker that may be slow, silent or gone: behind a thread, so that no step waits for it."""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

log = logging.getLogger(__name__)

MAX_ROWS = 10_000
"""Rows that wait for a tracker at most; newer ones are left out, and counted."""
_BATCH = 500
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_CREDENTIALS = re.compile(r"//[^/\s@]+@")


class RemoteTracker(Protocol):
    """Takes rows of numbers, and may take its time. One thread calls all of its methods."""

    def log(self, rows: Sequence[dict[str, Any]]) -> None:
        """Send rows, in order. A row that was sent before (a step that is done again, or a call
        that has failed half-way) must not be sent twice."""
        ...

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send what is left. `summary`: final figures; None: the run will go on."""
        ...


class Background:
    """One remote tracker, its queue and its thread.

    When it fails, that is said once; it is opened again after 5 s, then after longer and longer
    pauses, and rows wait for it meanwhile. What is not sent in the end stands in metrics.jsonl, and
    is sent by the next start of the run.

    Args:
        name: for messages.
        open_tracker: opens it, or opens it again; called in the thread.
        backlog: gives the rows of earlier starts that it lacks; called in the thread, once it is
            open.
        say: takes a line for the user; called in the thread.
        max_rows: rows that wait at most.
        first_pause_s: the first pause after it has failed.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], RemoteTracker],
        *,
        backlog: Callable[[], Sequence[dict[str, Any]]] = tuple,
        say: Callable[[str], object] = lambda _: None,
        max_rows: int = MAX_ROWS,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self.name = name
        self._open = open_tracker
        self._say = say
        self._backlog: Callable[[], Sequence[dict[str, Any]]] | None = backlog
        self._rows: deque[dict[str, Any]] = deque()
        self._max_rows = max_rows
        self._num_dropped = 0
        self._first_pause_s = first_pause_s
        self._pause_s = 0.0
        self._has_failed = False
        self._is_closing = False
        self._summary: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._is_done = threading.Event()
        # A daemon: a server that never answers must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def log(self, row: dict[str, Any]) -> None:
        """Leave a row for the thread; returns at once."""
        with self._changed:
            if len(self._rows) >= self._max_rows:
                self._num_dropped += 1
                return
            self._rows.append(row)
            self._changed.notify()

    def begin_close(self, summary: dict[str, Any] | None) -> None:
        """No rows follow; returns at once."""
        with self._changed:
            self._is_closing = True
            self._summary = summary
            self._changed.notify()

    def wait(self, end: float) -> bool:
        """Whether all is sent, or given up, before `end` (time.monotonic)."""
        return self._is_done.wait(max(0.0, end - time.monotonic()))

    def end_close(self, end: float) -> None:
        """Wait for the thread until `end`, and say what has not been sent."""
        is_done = self.wait(end)
        with self._changed:
            left = len(self._rows) + self._num_dropped
        if not is_done or left:
            silent = "" if is_done else " has not answered in time;"
            self._say(
                f"{self.name}:{silent} {left} recorded rows were not sent; metrics.jsonl has them"
            )

    def _work(self) -> None:
        tracker: RemoteTracker | None = None
        while True:
            rows, is_last = self._take(waits=tracker is not None)  # it is opened at once
            try:
                if tracker is None:
                    tracker = self._open()
                    if self._take_up_backlog():
                        continue
                tracker.log(rows)
                if is_last:
                    tracker.close(self._summary)
            except Exception as error:  # the thread's edge; a curve is not worth a run
                tracker = None
                self._failed(error)
                if is_last or self._rest():
                    break
                continue
            self._sent(len(rows))
            if is_last:
                break
        self._is_done.set()

    def _take(self, *, waits: bool) -> tuple[list[dict[str, Any]], bool]:
        """The next rows, which stay in the queue until they are sent; whether they are the last."""
        with self._changed:
            # Waits as long as the run takes for its next recorded step, or its end.
            self._changed.wait_for(lambda: self._rows or self._is_closing or not waits)
            rows = [self._rows[index] for index in range(min(_BATCH, len(self._rows)))]
            return rows, self._is_closing and len(rows) == len(self._rows)

    def _take_up_backlog(self) -> bool:
        """Put rows of earlier starts before those of this one; whether there were any."""
        if self._backlog is None:
            return False
        rows = self._backlog()
        self._backlog = None
        with self._changed:
            self._rows.extendleft(reversed(rows))
            self._max_rows += len(rows)
        return bool(rows)

    def _sent(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                self._rows.popleft()
        if self._pause_s:
            log.info("%s takes rows again", self.name)
        self._pause_s = 0.0

    def _rest(self) -> bool:
        """Pause after a failure; True: there is no time for another try.

        A run that ends in the pause gives it one last try at once.
        """
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or self._first_pause_s)
        with self._changed:
            was_closing = self._is_closing
            if not was_closing:
                self._changed.wait_for(lambda: self._is_closing, timeout=self._pause_s)
        return was_closing

    def _failed(self, error: Exception) -> None:
        text = redacted("".join(traceback.format_exception(error)).rstrip())
        if self._has_failed:
            log.debug("%s failed again\n%s", self.name, text)
            return
        self._has_failed = True
        log.info("%s failed\n%s", self.name, text)
        first = (redacted(str(error)).strip().splitlines() or [type(error).__name__])[0]
        self._say(
            f"{self.name} failed; training goes on, and it is tried again from time to time: "
            f"{first[:300]}"
        )


def redacted(text: str) -> str:
    """A message without the user names and passwords of the addresses in it."""
    return _CREDENTIALS.sub("//...@", text)

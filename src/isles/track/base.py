"""Metric trackers. A failing or slow tracker never stops or slows training."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from isles.run.records import write_record

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""One recorded step or evaluation: `kind` (train or eval), `step`, `at`, and numbers by name."""

CLOSE_S = 30.0
"""Longest wait for all trackers together, once training is over."""
_WARN_AFTER_S = 2.0

MAX_ROWS = 10_000
"""Maximum number of rows that wait for a remote tracker; newer rows are dropped and counted."""
_BATCH = 500
_CREDENTIALS = re.compile(r"//[^/\s@]+@")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that a tracker shows next to its curves. Contains no secrets.

    Args:
        name: the run's name.
        folder: the run directory.
        record: file in which a tracker keeps its own id of the run.
        config: every value of the run file by its dotted key, defaults filled in.
        about: versions, ranks, device, strategy.
    """

    name: str
    folder: Path
    record: Path
    config: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Writes rows of numbers to a disk of this machine. Rank 0 only."""

    def log(self, row: Row) -> None:
        """Write one row."""
        ...

    def close(self) -> None:
        """Write all buffered rows."""
        ...


class RemoteTracker(Protocol):
    """Sends rows of numbers, and may block. One thread calls all of its methods."""

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows, in order."""
        ...

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send the remaining rows. `summary`: final figures, or None if the run will be resumed."""
        ...


class Background:
    """A remote tracker in a separate thread, so that no step waits for it.

    metrics.jsonl has the rows that the tracker drops. The first failure is logged; later rows try
    again.

    Args:
        name: the tracker's name in messages.
        open_tracker: opens the tracker, and opens it again after a failure; called in the thread.
        print_line: prints a line for the user; called in the thread.
        max_rows: maximum number of waiting rows.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], RemoteTracker],
        *,
        print_line: Callable[[str], object] = lambda _: None,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.name = name
        self._open = open_tracker
        self._print_line = print_line
        self._rows: queue.Queue[Row | None] = queue.Queue(max_rows)
        self._num_logged = self._num_sent = 0
        self._has_failed = False
        self._summary: dict[str, Any] | None = None
        self._is_closing = threading.Event()
        # A daemon: a server that never answers must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Queue a row for the thread; does not wait."""
        self._num_logged += 1
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            log.debug("%s is too slow: a row was dropped", self.name)

    def begin_close(self, summary: dict[str, Any] | None) -> None:
        """Tell the thread that no rows follow; does not wait."""
        self._summary = summary
        self._is_closing.set()
        with contextlib.suppress(queue.Full):  # if it is full, the thread is awake
            self._rows.put_nowait(None)

    def wait(self, end: float) -> bool:
        """Wait until `end` (time.monotonic); return whether the thread has sent everything or given
        up."""
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def end_close(self, end: float) -> None:
        """Wait for the thread until `end`, and print the number of unsent rows."""
        is_done = self.wait(end)
        left = self._num_logged - self._num_sent
        if not is_done or left:
            silent = "" if is_done else " did not answer in time"
            self._print_line(
                f"{self.name}{silent}: {left} recorded rows were not sent (metrics.jsonl has them)"
            )

    def _work(self) -> None:
        tracker: RemoteTracker | None = None
        rows: list[Row | None] = []  # empty, so the tracker is opened before the first row
        while True:
            try:
                tracker = tracker or self._open()
                sent = [row for row in rows if row is not None]
                tracker.log(sent)
                self._num_sent += len(sent)
            except Exception as error:  # the thread's edge; a curve is not worth a run
                tracker = None
                self._failed(error)
            if self._is_closing.is_set() and self._rows.empty():
                break
            rows = [self._rows.get()]
            while len(rows) < _BATCH and not self._rows.empty():
                rows.append(self._rows.get())
        if tracker is not None:
            try:
                tracker.close(self._summary)
            except Exception as error:  # as above
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        text = redacted("".join(traceback.format_exception(error)).rstrip())
        if self._has_failed:
            log.debug("%s failed again\n%s", self.name, text)
            return
        self._has_failed = True
        log.info("%s failed\n%s", self.name, text)
        first = (redacted(str(error)).strip().splitlines() or [type(error).__name__])[0]
        self._print_line(
            f"{self.name} failed; training continues and later rows try again ({first[:300]})"
        )


class Trackers:
    """Several trackers behind one interface. A failed tracker is reported once; training continues.

    Args:
        trackers: called directly; a tracker that fails is not used again.
        remote: trackers with a thread each.
        print_line: prints a line for the user.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        remote: Sequence[Background] = (),
        print_line: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._trackers = list(trackers)
        self._remote = tuple(remote)
        self._print_line = print_line

    def log(self, row: Row) -> None:
        """Hand a row to every tracker."""
        self._each_local(lambda tracker: tracker.log(row))
        for remote in self._remote:
            remote.log(row)

    def close(self, summary: dict[str, Any] | None = None, *, timeout_s: float = CLOSE_S) -> None:
        """Close every tracker. Trackers with a thread share `timeout_s`.

        Args:
            summary: the final figures; None if the run was stopped and will be resumed.
            timeout_s: longest wait.
        """
        end = time.monotonic() + timeout_s
        for remote in self._remote:
            remote.begin_close(summary)
        self._each_local(lambda tracker: tracker.close())
        soon = min(end, time.monotonic() + _WARN_AFTER_S)
        late = [remote.name for remote in self._remote if not remote.wait(soon)]
        if late:
            self._print_line(f"waiting at most {timeout_s:.0f}s for {' and '.join(late)}")
        for remote in self._remote:
            remote.end_close(end)

    def _each_local(self, use: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                use(tracker)
            except Exception as error:  # a curve is not worth a run; the traceback says why
                name = type(tracker).__name__.removesuffix("Tracker")
                log.info("%s failed", name, exc_info=error)
                self._print_line(
                    f"{name} failed and is not used again; training continues ({error})"
                )
                self._trackers.remove(tracker)


def numbers(row: Row) -> list[tuple[str, float]]:
    """The numeric fields of a row, by name."""
    return [
        (name, value)
        for name, value in row.items()
        if name not in ("kind", "step", "at") and isinstance(value, int | float)
    ]


def keep_id(run: RunFacts, **ids: str) -> None:
    """Write a tracker's own id of the run to its record, for the next attempt."""
    run.record.parent.mkdir(exist_ok=True)
    write_record(run.record, ids)


def redacted(text: str) -> str:
    """The text without user names and passwords in URLs."""
    return _CREDENTIALS.sub("//...@", text)

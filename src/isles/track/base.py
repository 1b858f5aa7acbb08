"""Curves, and the rule that a tracker never stops or slows training."""

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
"""Rows that wait for a remote tracker at most; newer ones are left out, and counted."""
_BATCH = 500
_CREDENTIALS = re.compile(r"//[^/\s@]+@")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a tracker shows of a run besides its curves; there are no secrets in it.

    Args:
        name: the run's name.
        folder: the run directory.
        record: where a tracker keeps its own id of the run.
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
        """Write what is still in memory."""
        ...


class RemoteTracker(Protocol):
    """Sends rows of numbers, and may take its time. One thread calls all of its methods."""

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows, in order."""
        ...

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send what is left. `summary`: final figures; None: the run will go on."""
        ...


class Background:
    """A remote tracker behind a thread, so that no step waits for it.

    A row that the tracker does not take is left out: metrics.jsonl has them all. The first failure
    is logged; later rows try again.

    Args:
        name: for messages.
        open_tracker: opens the tracker, again after a failure; called in the thread.
        print_line: takes a line for the user; called in the thread.
        max_rows: rows that wait at most.
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
        """Leave a row for the thread; returns at once."""
        self._num_logged += 1
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            log.debug("%s is too slow: a row is left out", self.name)

    def begin_close(self, summary: dict[str, Any] | None) -> None:
        """No rows follow; returns at once."""
        self._summary = summary
        self._is_closing.set()
        with contextlib.suppress(queue.Full):  # then the thread has no need to be woken
            self._rows.put_nowait(None)

    def wait(self, end: float) -> bool:
        """Whether all is sent, or given up, before `end` (time.monotonic)."""
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def end_close(self, end: float) -> None:
        """Wait for the thread until `end`, and say how many rows have not been sent."""
        is_done = self.wait(end)
        left = self._num_logged - self._num_sent
        if not is_done or left:
            silent = "" if is_done else " has not answered in time;"
            self._print_line(
                f"{self.name}:{silent} {left} recorded rows were not sent; metrics.jsonl has them"
            )

    def _work(self) -> None:
        tracker: RemoteTracker | None = None
        rows: list[Row | None] = []  # the tracker is opened at once
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
            f"{self.name} failed; training goes on, and later rows try again: {first[:300]}"
        )


class Trackers:
    """Several trackers as one; one that fails is named once, and training goes on.

    Args:
        trackers: written to at once; one that fails is left out from then on.
        remote: behind a thread each.
        print_line: takes a line for the user.
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
        """Close every tracker; those behind a thread have `timeout_s` together.

        Args:
            summary: the final figures; None: the run has stopped, and will go on.
            timeout_s: longest wait.
        """
        end = time.monotonic() + timeout_s
        for remote in self._remote:
            remote.begin_close(summary)
        self._each_local(lambda tracker: tracker.close())
        soon = min(end, time.monotonic() + _WARN_AFTER_S)
        late = [remote.name for remote in self._remote if not remote.wait(soon)]
        if late:
            self._print_line(f"waiting for {' and '.join(late)}, {timeout_s:.0f}s at most")
        for remote in self._remote:
            remote.end_close(end)

    def _each_local(self, use: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                use(tracker)
            except Exception as error:  # a curve is not worth a run; the traceback says why
                name = type(tracker).__name__.removesuffix("Tracker")
                log.info("%s failed", name, exc_info=error)
                self._print_line(f"{name} failed and is left out; training goes on: {error}")
                self._trackers.remove(tracker)


def numbers(row: Row) -> list[tuple[str, float]]:
    """The figures of a row by name."""
    return [
        (name, value)
        for name, value in row.items()
        if name not in ("kind", "step", "at") and isinstance(value, int | float)
    ]


def keep_id(run: RunFacts, **ids: str) -> None:
    """Put a tracker's own id of the run on record, for the next start."""
    run.record.parent.mkdir(exist_ok=True)
    write_record(run.record, ids)


def redacted(text: str) -> str:
    """A message without the user names and passwords of the addresses in it."""
    return _CREDENTIALS.sub("//...@", text)

"""The sign of life of a process that prepares tokens, and those who wait for it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.errors import CommunicationError, DataError, UserError
from isles.run.process import ProcessId
from isles.run.records import read_record, write_record

log = logging.getLogger(__name__)

REPORT_EVERY_S = 2.0


def progress_path(cache_dir: Path, key: str) -> Path:
    """The record that the process which prepares this key keeps fresh."""
    return cache_dir / f".{key}.progress.json"


class Reporter:
    """Tells how far preparing is: to people, and through the record to those who wait.

    Args:
        path: of the record.
        name: of the source.
        progress: called with a line for people.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        progress: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._name = name
        self._progress = progress
        self._process = ProcessId.of(os.getpid()).record()
        self._clock = clock
        self._last = clock()
        self._write({"state": "running", "message": f"{name}: starting"})

    def tick(self, num_documents: int, num_tokens: int) -> None:
        """Called often; reports every REPORT_EVERY_S."""
        if self._clock() - self._last < REPORT_EVERY_S:
            return
        message = count_message(self._name, num_documents, num_tokens)
        self._write({"state": "running", "message": message})
        self._progress(message)
        self._last = self._clock()  # after the work: a slow disk is not asked more often

    def done(self, num_documents: int, num_tokens: int) -> None:
        """The folder stands: the last line, and no more record."""
        self._path.unlink(missing_ok=True)
        self._progress(count_message(self._name, num_documents, num_tokens))

    def failed(self, error: BaseException) -> None:
        """Leave the reason to those who wait."""
        if not isinstance(error, UserError):
            fix = "look at the log of the process that prepared it"
            error = DataError(f"{type(error).__name__}: {error}", where=self._name, fix=fix)
        record = {"message": error.what, "where": error.where, "fix": error.fix, "id": error.id}
        self._write({"state": "failed", **record})

    def _write(self, record: dict[str, Any]) -> None:
        try:
            write_record(self._path, {**self._process, **record, "at": time.time()})
        except OSError as error:  # a full disk shows where the tokens are written
            log.warning("progress record=%s not written: %s", self._path, error)


def count_message(name: str, num_documents: int, num_tokens: int) -> str:
    """Such as `python-stdlib: 312 documents, 4.1M tokens`."""
    tokens = f"{num_tokens / 1e6:.1f}M" if num_tokens >= 100_000 else str(num_tokens)
    return f"{name}: {num_documents} documents, {tokens} tokens"


class Watch:
    """Watches a progress record; time counts from its last change, by this process' own clock.

    What the record says when it is first seen may be left over from an earlier start, so it counts
    only once it has changed.

    Args:
        path: of the record.
        no_progress_s: longest time without a change.
        clock: seconds, for tests.
        is_fresh: whether the record cannot be left over, so that it counts from the first look.
    """

    def __init__(
        self,
        path: Path,
        no_progress_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_fresh: bool = False,
    ) -> None:
        self._clock = clock
        self._path = path
        self._no_progress_s = no_progress_s
        self._record = read_record(path)
        self._first = None if is_fresh else self._record
        self._since = clock()

    def find_fault(self, *, failure_counts: bool) -> UserError | None:
        """Why waiting on is pointless, or None.

        Args:
            failure_counts: whether the other's failure or death is a reason, rather than an
                occasion to take over.
        """
        record = read_record(self._path)
        if record is not None and record != self._record:
            self._record, self._since = record, self._clock()
        late = self._clock() - self._since > self._no_progress_s
        if self._record is None:
            return self._silence("no process has begun to") if late else None
        if failure_counts and (late or self._record is not self._first):
            if self._record["state"] == "failed":
                return self._failure(self._record)
            process = ProcessId.from_record(self._record)
            if process is not None and process.is_here() and not process.is_alive():
                return self._silence(f"{self._who()} died and does not")
        return self._silence(f"{self._who()} does not") if late else None

    def _who(self) -> str:
        record = self._record or {}
        return f"process {record.get('pid')} on {record.get('host')} ({record.get('message')})"

    def _failure(self, record: dict[str, Any]) -> DataError:
        where = f"{record['where']} (on {record['host']}, process {record['pid']})"
        return DataError(record["message"], where=where, fix=record["fix"], id=record.get("id"))

    def _silence(self, who: str) -> CommunicationError:
        waited_s = self._clock() - self._since
        return CommunicationError(
            f"{who} prepare the tokens that are waited for: {waited_s:.0f} s without a sign",
            where=str(self._path),
            fix="look at that process' log; every rank must see the same data.cache_dir",
            id="data.waiting",
        )


def wait_until(
    is_done: Callable[[], bool], watch: Watch, *, failure_counts: bool, poll_s: float = 0.1
) -> None:
    """Poll until done.

    Raises:
        UserError: what the watch finds.
    """
    while not is_done():
        fault = watch.find_fault(failure_counts=failure_counts)
        if fault is not None:
            # It may have finished between the two looks.
            with suppress(OSError):
                if is_done():
                    return
            raise fault
        time.sleep(poll_s)

"""What rank 0 tells the outside: status.json and the trackers' rows."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from isles.run.paths import RunDir
from isles.run.records import write_record
from isles.run.restarts import LastStep
from isles.track.base import Trackers

log = logging.getLogger(__name__)

_STATUS_EVERY_S = 0.5
_BEAT_S = 5.0
"""So often at least, so that it can be seen from afar that rank 0 lives."""


class Recorder:
    """Keeps status.json and the curves. On other ranks than 0 every method does nothing.

    Args:
        run_dir: where the records lie.
        is_main: whether this is rank 0.
        world_size: ranks in the run.
        last_step: where each step is noted; None: nowhere.
        beat_s: how often status.json is written at least.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        is_main: bool,
        world_size: int,
        last_step: LastStep | None = None,
        beat_s: float = _BEAT_S,
    ) -> None:
        self._beat_s = beat_s
        self._run_dir = run_dir
        self._last_step = last_step
        self._is_main = is_main
        self._trackers = Trackers([])
        self._written_at = 0.0
        self._progress_at = time.time()
        self._notes: list[str] = []
        self._writing = threading.Lock()
        self._is_closed = threading.Event()
        self._summary: dict[str, Any] | None = None
        self.status: dict[str, Any] = {"phase": "starting", "detail": "", "world_size": world_size}
        if is_main:
            threading.Thread(target=self._beat, name="status", daemon=True).start()

    def use(self, trackers: Trackers) -> None:
        """Where rows go from now on."""
        self._trackers = trackers

    def phase(self, phase: str, detail: str = "") -> None:
        """What the run does now: starting, preparing data, training, saving …"""
        if not self._is_main:
            return
        if (phase, detail) != (self.status["phase"], self.status["detail"]):
            log.info("phase=%s %s", phase.replace(" ", "-"), detail)
        self.status |= {"phase": phase, "detail": detail}
        self._progress_at = time.time()
        self._write()

    def update(self, **fields: Any) -> None:
        """Other fields of status.json."""
        self.status |= fields
        self._progress_at = time.time()
        if self._is_main and time.time() - self._written_at >= _STATUS_EVERY_S:
            self._write()

    def note(self, text: str) -> None:
        """A line for the user, logged and shown once. Any thread may call this."""
        log.warning("%s", text)
        self._notes.append(text)
        if self._is_main and threading.current_thread() is threading.main_thread():
            self._write()  # of another thread's note, the next status tells

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is over: these are its final figures, for the trackers."""
        self._summary = summary

    def step_done(self, step: int) -> None:
        """This step is done: if a rank dies, it is known how far they had come."""
        self._progress_at = time.time()
        if self._last_step is not None:
            self._last_step.note(step)

    def row(self, row: dict[str, Any]) -> None:
        """One recorded step or evaluation, to every tracker."""
        if self._is_main:
            self._trackers.log({name: _finite(value) for name, value in row.items()})

    def close(self) -> None:
        """Close the trackers, which takes half a minute at most, and write the last status."""
        if self._is_main:
            self._write()
            self._trackers.close(self._summary)
            self._is_closed.set()
            self._write()
        if self._last_step is not None:
            self._last_step.close()

    def _beat(self) -> None:
        # A sign of life, also while the main thread is busy with one long thing.
        while not self._is_closed.wait(self._beat_s):
            if time.time() - self._written_at >= self._beat_s:
                self._write(is_beat=True)

    def _write(self, *, is_beat: bool = False) -> None:
        with self._writing:
            if is_beat and self._is_closed.is_set():
                return  # the last word is not overwritten
            self._written_at = time.time()
            record = {name: _finite(value) for name, value in list(self.status.items())}
            if self._notes:
                record["notes"] = list(self._notes)
            record |= {"progress_at": self._progress_at, "updated_at": self._written_at}
            try:
                write_record(self._run_dir.status, record, durable=False)
            except OSError as error:  # a full disk must not end training before a save says so
                log.warning("status.json could not be written: %s", error)


def _finite(value: Any) -> Any:
    # JSON knows neither NaN nor infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""status.json of a script's run: a sign of life beside what the script tells by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from isles.run.env import RankEnv
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record

_BEAT_S = 5.0


class ScriptStatus:
    """Keeps status.json while a script runs. On other ranks than 0 every method does nothing."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, env: RankEnv, script: str) -> None:
        """`script`: as the run file names it."""
        self._path = run_dir.status
        self._log = attempt.rank_log(env.rank)
        self._is_main = env.rank == 0
        self._is_over = threading.Event()
        now = time.time()
        fields = {"phase": "running", "detail": script, "script": script, "progress_at": now}
        self._write({**fields, "world_size": env.world_size, "updated_at": now})

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Meanwhile status.json is never older than a few seconds."""
        thread = threading.Thread(target=self._beat, name="status", daemon=True)
        if self._is_main:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            if self._is_main:
                thread.join()

    def phase(self, phase: str, detail: str = "") -> None:
        """What has become of it."""
        status = read_record(self._path) or {}
        self._write({**status, "phase": phase, "detail": detail, "updated_at": time.time()})

    def note(self, text: str) -> None:
        """A line for the user, shown once."""
        if self._is_main:
            status = read_record(self._path) or {}
            self._write({**status, "notes": [*status.get("notes", ()), text]})

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            status, now = read_record(self._path) or {}, time.time()
            if now - float(status.get("updated_at", 0.0)) < _BEAT_S:
                continue  # the script has just told something
            with suppress(OSError):
                printed_at = self._log.stat().st_mtime
                status["progress_at"] = max(printed_at, float(status.get("progress_at", 0.0)))
            self._write({**status, "updated_at": now})

    def _write(self, status: dict[str, Any]) -> None:
        if self._is_main:
            with suppress(OSError):  # a full disk is for the script's next save to report
                write_record(self._path, status, durable=False)

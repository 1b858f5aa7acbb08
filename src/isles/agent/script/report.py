"""Progress of a user's own script: what it reports of its steps, and status.json beside it.

import isles

isles.report(step, loss=loss.item(), total_steps=1000)
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, SupportsFloat

from isles.run.env import RankEnv, read_rank_env, restarts_of_script, run_dir_of_script
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.restarts import LastStep

_STATUS_EVERY_S = 0.5
_HEARTBEAT_S = 5.0


def report(
    step: int,
    *,
    total_steps: int | None = None,
    tokens_per_second: float | None = None,
    **figures: SupportsFloat,
) -> None:
    """Report that a step is done, for `isles status` and the curves.

    On other ranks than 0, and where the script was not started by isles, it does nothing.

    Args:
        step: its number.
        total_steps: of the whole run.
        tokens_per_second: speed.
        figures: what else was measured, such as loss: numbers, or tensors with one element.
    """
    env, path = read_rank_env(), run_dir_of_script()
    if path is None or env.rank != 0:
        return
    run_dir, now = RunDir(path), time.time()
    found = {name: float(value) for name, value in figures.items()}
    if tokens_per_second is not None:
        found["tokens_per_second"] = tokens_per_second
    # JSON knows neither NaN nor infinity.
    numbers = {name: value if math.isfinite(value) else None for name, value in found.items()}
    with suppress(OSError):  # a full disk is for the script's next save to report
        with run_dir.metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": "train", "step": step, **numbers, "at": now}) + "\n")
        last_step = LastStep(run_dir.attempt(env.attempt).last_step, restarts_of_script())
        last_step.note(step)
        last_step.close()
        status = read_record(run_dir.status) or {}
        is_old = now - float(status.get("progress_at", 0.0)) >= _STATUS_EVERY_S
        if status.get("step") is None or step == total_steps or is_old:
            status |= {"phase": "training", "detail": "", "step": step, **numbers}
            status |= {"updated_at": now, "progress_at": now}
            if total_steps is not None:
                status["total_steps"] = total_steps
            write_record(run_dir.status, status, durable=False)


class ScriptStatus:
    """Keeps status.json while a script runs. On other ranks than 0 every method does nothing.

    Args:
        run_dir, attempt, env: of the rank.
        script: as the run file names it.
    """

    def __init__(self, run_dir: RunDir, attempt: Attempt, env: RankEnv, script: str) -> None:
        self._path = run_dir.status
        self._log = attempt.rank_log(env.rank)
        self._is_main = env.rank == 0
        self._is_over = threading.Event()
        now = time.time()
        fields = {"phase": "running", "detail": script, "script": script, "progress_at": now}
        self._write({**fields, "world_size": env.world_size, "updated_at": now})

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Meanwhile status.json is never older than a few seconds."""
        thread = threading.Thread(target=self._keep_fresh, name="status", daemon=True)
        if self._is_main:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            if self._is_main:
                thread.join()

    def finished(self) -> None:
        status = read_record(self._path) or {}
        self._write({**status, "phase": "finished", "detail": "", "updated_at": time.time()})

    def note(self, text: str) -> None:
        status = read_record(self._path) or {}
        self._write({**status, "notes": [*status.get("notes", ()), text]})

    def _keep_fresh(self) -> None:
        while not self._is_over.wait(_HEARTBEAT_S):
            status, now = read_record(self._path) or {}, time.time()
            if now - float(status.get("updated_at", 0.0)) < _HEARTBEAT_S:
                continue  # the script has just reported a step
            with suppress(OSError):
                printed_at = self._log.stat().st_mtime
                status["progress_at"] = max(printed_at, float(status.get("progress_at", 0.0)))
            self._write({**status, "updated_at": now})

    def _write(self, status: dict[str, Any]) -> None:
        if self._is_main:
            with suppress(OSError):  # a full disk is for the script's next save to report
                write_record(self._path, status, durable=False)

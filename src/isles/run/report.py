"""How far a script of the user's own has come: told by itself, for `isles status` and the curves.

    import isles

    isles.report(step, loss=loss.item(), total_steps=1000)

On other ranks than 0, and where the script was not started by isles, it does nothing.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from typing import Any, SupportsFloat

from isles.run.env import read_rank_env, restarts_of_script, run_dir_of_script
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from isles.run.restarts import LastStep

_STATUS_EVERY_S = 0.5


def report(
    step: int,
    *,
    total_steps: int | None = None,
    tokens_per_second: float | None = None,
    **figures: SupportsFloat,
) -> None:
    """Tell that a step is done.

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
    numbers = {name: _finite(float(value)) for name, value in figures.items()}
    if tokens_per_second is not None:
        numbers["tokens_per_second"] = _finite(tokens_per_second)
    with suppress(OSError):  # a full disk is for the script's next save to report
        with run_dir.metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": "train", "step": step, **numbers, "at": now}) + "\n")
        last_step = LastStep(run_dir.attempt(env.attempt).last_step, restarts_of_script())
        last_step.note(step)
        last_step.close()
        status = read_record(run_dir.status) or {}
        is_last = step == total_steps
        if status.get("step") is None or is_last or _is_old(status, now):
            status |= {"phase": "training", "detail": "", "step": step, **numbers}
            status |= {"updated_at": now, "progress_at": now}
            if total_steps is not None:
                status["total_steps"] = total_steps
            write_record(run_dir.status, status, durable=False)


def _finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def _is_old(status: dict[str, Any], now_s: float) -> bool:
    return now_s - float(status.get("progress_at", 0.0)) >= _STATUS_EVERY_S

"""`isles.report`: a user's own script reports its steps."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from typing import SupportsFloat

from isles.run.env import num_restarts, read_rank_env, run_dir_of_script
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
    """Report that a step is done, for `isles status` and the trackers.

        isles.report(step, loss=loss.item(), total_steps=1000)

    Does nothing on ranks other than 0, and if isles did not start the script.

    Args:
        step: the number of steps done.
        total_steps: steps of the whole run.
        figures: other metrics, such as loss: numbers, or tensors with one element.
    """
    env, path = read_rank_env(), run_dir_of_script()
    if path is None or env.rank != 0:
        return
    run_dir, now = RunDir(path), time.time()
    found = {name: float(value) for name, value in figures.items()}
    if tokens_per_second is not None:
        found["tokens_per_second"] = tokens_per_second
    # JSON has neither NaN nor infinity.
    numbers = {name: value if math.isfinite(value) else None for name, value in found.items()}
    with suppress(OSError):  # a full disk is for the script's next save to report
        with run_dir.metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": "train", "step": step, **numbers, "at": now}) + "\n")
        last_step = LastStep(run_dir.attempt(env.attempt).last_step, num_restarts())
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

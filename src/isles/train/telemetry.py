"""Sends the position, the rows and the memory of a rank to the agent of its node each second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from isles.dist.world import gpu_bytes
from isles.run.live import Tell
from isles.train.parts import Parts

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_CLOSING_S = 5.0


@contextmanager
def sending(parts: Parts, restart: int, tell: Tell | None) -> Iterator[None]:
    """Send messages from a thread, until the end of the block.

    Args:
        restart: the number of this start of the ranks.
        tell: sends a message; None without an agent.
    """
    is_over = threading.Event()

    def send(tell: Tell) -> None:
        while not is_over.wait(_EVERY_S):
            try:
                tell({"restart": restart, **message(parts)})
            except (OSError, RuntimeError) as error:  # from the agent's pipe, or from torch
                log.debug("%s", error)
            except Exception:  # watchers must not end a run
                log.exception("this rank no longer reports its status; the run continues")
                return

    if tell is None:
        yield
        return
    thread = threading.Thread(target=send, args=(tell,), name="telemetry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_CLOSING_S)


def message(parts: Parts) -> dict[str, Any]:
    """The values that watchers see of this rank. Never waits for a GPU; any thread may call it."""
    clock, split, device = parts.meter.clock, parts.loader.split, parts.world.device
    moment, dp_rank = clock.moment, parts.mesh.dp_rank
    found: dict[str, Any] = {
        "step": moment.step,
        "phase": moment.phase,
        "stage": moment.stage,
        "stage_s": round(clock.now() - moment.stage_since, 3),
        "step_s": clock.steps[-1] if clock.steps else None,
        "rows": split.rows[dp_rank],
        "micro_batch": split.micro_batch_sizes[dp_rank],
        "parts": parts.meter.parts,
        "device": parts.world.device_name,
        "gpu": None,
    }
    if device.type == "cuda":
        held = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
        found |= {"gpu": device.index, "memory_bytes": held["current"]}
        found |= {"peak_bytes": held["peak"], "limit_bytes": gpu_bytes(device)}
    return found

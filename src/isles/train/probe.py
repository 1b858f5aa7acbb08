"""The largest micro-batch that fits on the GPU, found by trying."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from isles.config.run import RunConfig
from isles.dist.world import World
from isles.errors import OutOfMemoryError
from isles.rundir.manifest import CheckpointInfo

log = logging.getLogger(__name__)

CPU_MICRO_BATCH_SIZE = 8
"""On a CPU memory is shared and large micro-batches gain nothing: this, or the largest divisor of
the rank's rows below it."""

_MEMORY_SHARE = 0.9
"""Of the GPU's memory that a micro-batch may fill; the rest is for fragmentation."""


def choose_micro_batch_size(
    model: nn.Module,
    config: RunConfig,
    rows_per_rank: int,
    world: World,
    resume_from: CheckpointInfo | None,
) -> int:
    """The run file's micro-batch size, or the largest that fits. All ranks must call this.

    A run that goes on keeps the size it had, as long as it divides this rank's rows: another size
    adds the same numbers in another order.

    Raises:
        OutOfMemoryError: not even one row fits.
    """
    wanted = config.training.micro_batch_size
    if wanted != "auto":
        return wanted
    if resume_from is not None:
        before = int(resume_from.manifest["micro_batch_size"])
        if rows_per_rank % before == 0:
            return before
    divisors = [size for size in range(1, rows_per_rank + 1) if rows_per_rank % size == 0]
    if world.device.type == "cpu":
        return max(size for size in divisors if size <= CPU_MICRO_BATCH_SIZE)
    mine = _largest_that_fits(model, config, divisors, world.device)
    smallest = min(world.gather(mine))
    if smallest == 0:
        raise OutOfMemoryError(
            f"one sequence of {config.data.seq_length} tokens does not fit on the GPU",
            where=f"rank {world.rank} on {world.host}",
            fix="training.gradient_checkpointing: full, a shorter data.seq_length, "
            "training.precision: bf16-true, or a smaller model",
        )
    log.info("micro_batch_size=%d was found to fit", smallest)
    return smallest


def _largest_that_fits(
    model: nn.Module, config: RunConfig, sizes: list[int], device: torch.device
) -> int:
    """Try sizes upwards; stop where the next is foreseen to overflow, or does."""
    total = torch.cuda.get_device_properties(device).total_memory
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # AdamW keeps two numbers a weight, DDP a second copy of the gradients at most.
    reserve = 2 * weights + (weights if dist.get_world_size() > 1 else 0)
    budget = total * _MEMORY_SHARE - reserve
    state = torch.cuda.get_rng_state(device)
    best = 0
    try:
        for size in sizes:
            torch.cuda.reset_peak_memory_stats(device)
            base = torch.cuda.memory_allocated(device)
            _try(model, config, size, device)
            peak = torch.cuda.max_memory_allocated(device)
            if peak > budget:
                break
            best = size
            larger = [other for other in sizes if other > size]
            if larger and base + (peak - base) * larger[0] / size > budget:
                break
    except torch.OutOfMemoryError:
        pass  # the size before this one is the answer
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.set_rng_state(state, device)
        torch.cuda.reset_peak_memory_stats(device)
    return best


def _try(model: Any, config: RunConfig, rows: int, device: torch.device) -> None:
    precision = config.training.precision
    dtype = torch.float16 if precision == "fp16-mixed" else torch.bfloat16
    tokens = torch.zeros((rows, config.data.seq_length), dtype=torch.int64, device=device)
    with torch.autocast("cuda", dtype=dtype, enabled=precision.endswith("mixed")):
        logits = model(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]

"""DeepSpeed as isles starts it: over our process group, without its launcher, quietly."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from isles.config.interop.deepspeed import Json, missing_deepspeed
from isles.dist.world import World
from isles.errors import PreflightError, UserError


def import_deepspeed(world: World) -> Any:  # an untyped library
    """The package deepspeed, on this rank's kind of device.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if fault := missing_deepspeed():
        raise fault
    # DeepSpeed looks for both in the environment, and would guess the kind of device otherwise.
    os.environ["DS_ACCELERATOR"] = world.device.type
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    with _quiet("torchao"):  # it names each of its CUDA libraries that it cannot load
        import deepspeed
        import deepspeed.ops

    # Of its calls, which are DeepSpeed's to change; they come once for each line that calls.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning
    )
    # A shared-memory all-reduce for CPUs that would be compiled at the start; gloo is there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start_deepspeed(
    deepspeed: Any, model: nn.Module, optimizer: Optimizer, settings: Json, world: World
) -> Any:
    """DeepSpeed's engine over a model and a torch optimizer. All ranks must call this.

    Args:
        deepspeed: the package.
        model: the same weights on every rank, or cut by deepspeed.zero.Init already.
        optimizer: over the parameters of the model.
        settings: the whole of its JSON, nothing left on `auto`.
        world: the ranks; the default process group is used.
    """
    # What it warns of here isles has chosen on purpose; what it prints are its memory readings.
    with _quiet("DeepSpeed", keep=logging.ERROR), contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
    return engine


def check_settings(settings: Json, world: World) -> None:
    """Every rank must have read the same. All ranks must call this.

    Raises:
        UserError: naming the rank and host that read something else.
    """
    mine = json.dumps(settings, sort_keys=True)
    for rank, host, theirs in world.gather((world.rank, world.host, mine)):
        if theirs != mine:
            raise UserError(
                f"rank {rank} has read another DeepSpeed file than rank {world.rank}",
                where=f"strategy.config_file on host {host}",
                fix="give every host the same file",
            )


def check_device(deepspeed: Any, settings: Json, world: World) -> None:
    """Refuse what this machine cannot do, before DeepSpeed fails in the middle of it.

    Raises:
        PreflightError: a precision or an offload.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    where = f"rank {world.rank} on {world.host}"
    for name, is_supported in (
        ("bf16", accelerator.is_bf16_supported),
        ("fp16", accelerator.is_fp16_supported),
    ):
        if settings.get(name, {}).get("enabled") and not is_supported():
            raise PreflightError(
                f"DeepSpeed cannot compute in {name} on this {world.device.type}",
                where=where,
                fix="use another training.precision; 32-true works everywhere",
                id="strategy.deepspeed",
            )
    zero = settings["zero_optimization"]
    offloads = [zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")]
    if "nvme" in offloads and not deepspeed.ops.__compatible_ops__["async_io"]:
        raise PreflightError(
            "offloading to nvme needs DeepSpeed's async_io, which cannot be built here",
            where=where,
            fix="install libaio (Debian: libaio-dev) and a C++ compiler, see `ds_report`; or "
            "offload to cpu",
            id="strategy.deepspeed",
        )


@contextlib.contextmanager
def _quiet(name: str, keep: int = logging.CRITICAL) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(keep)
    try:
        yield
    finally:
        logger.setLevel(before)

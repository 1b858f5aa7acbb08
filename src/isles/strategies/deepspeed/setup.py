"""DeepSpeed as isles starts it: over our process group, without its launcher, quietly.

For stage 3 the model is handed over tensor by tensor, so that no rank ever holds it whole.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty
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


def cut_model(
    deepspeed: Any,
    model: nn.Module,
    materialize: Callable[[nn.Module], None],
    make_optimizer: Callable[[nn.Module], Optimizer],
    settings: Json,
    world: World,
) -> Optimizer:
    """Fill an empty model and hand it to DeepSpeed, tensor by tensor. All ranks must call this.

    Every rank first fills its part of each tensor in CPU memory; then one tensor at a time is put
    together, and cut again as DeepSpeed wants it.

    Args:
        deepspeed: the package.
        model: on the meta device; afterwards its parameters are DeepSpeed's.
        materialize: fills a model whose memory has been allocated, this rank's part of it.
        make_optimizer: the optimizer over a module.
        settings: DeepSpeed's JSON.
        world: the ranks.

    Returns:
        The optimizer over DeepSpeed's parameters.
    """
    _allocate(model, init_device_mesh("cpu", (world.world_size,)))
    materialize(model)
    # Made now, when the parameters still have their shapes, by which it groups them.
    optimizer = make_optimizer(model)
    init = deepspeed.zero.Init(config_dict_or_path=settings)
    dtype = _compute_dtype(settings)
    # By number from here on, so that nothing holds a part whose parameter DeepSpeed has taken.
    number = {p: n for n, p in enumerate(model.parameters())}
    grouped = [[number[p] for p in group["params"]] for group in optimizer.param_groups]
    places = [(module, key, number[p]) for module, key, p in _parameters(model)]
    del number
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    taken: dict[int, nn.Parameter] = {}
    for module, key, index in places:
        if index not in taken:
            taken[index] = _whole(module._parameters[key], world.device, dtype)
            init._convert_to_zero_parameters([taken[index]])
        module._parameters[key] = taken[index]
    for group, indices in zip(optimizer.param_groups, grouped, strict=True):
        group["params"] = [taken[index] for index in indices]
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(world.device)
    return optimizer


def _whole(
    parameter: nn.Parameter | None, device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    assert parameter is not None and isinstance(parameter.data, DTensor)
    whole = parameter.data.full_tensor().to(device, dtype)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _allocate(model: nn.Module, mesh: DeviceMesh) -> None:
    # Memory for this rank's part of every parameter, and for all buffers.
    cut: dict[nn.Parameter, nn.Parameter] = {}
    for module, key, parameter in list(_parameters(model)):
        if parameter not in cut:
            part = empty(
                *parameter.shape, dtype=parameter.dtype, device_mesh=mesh, placements=[Shard(0)]
            )
            cut[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module._parameters[key] = cut[parameter]
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield module, key, parameter


def _compute_dtype(settings: Json) -> torch.dtype:
    if settings.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if settings.get("fp16", {}).get("enabled") else torch.float32


@contextlib.contextmanager
def _quiet(name: str, keep: int = logging.CRITICAL) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(keep)
    try:
        yield
    finally:
        logger.setLevel(before)

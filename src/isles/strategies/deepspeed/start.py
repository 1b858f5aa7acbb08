"""A model for ZeRO stage 3 that no rank ever holds whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty
from torch.optim import Optimizer

from isles.config.interop.deepspeed import Json
from isles.dist.world import World


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
    """Memory for this rank's part of every parameter, and for all buffers."""
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

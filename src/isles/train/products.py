"""Products of fp32 matrices: in fp32, or in TF32 on the tensor cores of NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from isles.config.sections.training import TrainingConfig
from isles.dist.world import World
from isles.facts.gpus import TF32_CAPABILITY, Products, find_gpu

_EXACT, _TF32 = "highest", "high"
"""Names of torch."""

_PAYS = 1.2
"""Speedup that is worth a line. TF32 is not faster than fp32 on a GeForce."""


@contextlib.contextmanager
def fp32_products(training: TrainingConfig, device: str) -> Iterator[None]:
    """Multiply fp32 matrices as `training.tf32` says, inside a `with`.

    Args:
        device: `cuda` or `cpu`.
    """
    before = torch.get_float32_matmul_precision()
    if training.tf32 and device == "cuda":
        # Not `fp32_precision`, the newer name: torch.compile reads the old one, and torch refuses
        # to read the old name after the new one was set.
        torch.set_float32_matmul_precision(_TF32)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def products_of_export(model: nn.Module) -> Iterator[None]:
    """Multiply as a reader of the exported model does, without fp8 and TF32, inside a `with`."""
    layers = [m for m in model.modules() if type(m).__name__ == "Float8Linear"]
    for layer in layers:
        layer.forward = functools.partial(nn.Linear.forward, layer)  # type: ignore[arg-type]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(_EXACT)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for layer in layers:
            del layer.forward


def keep_angles_exact(model: nn.Module) -> None:
    """Compute the angles of rotary embeddings in fp32, whatever other products are computed in.

    Some versions of transformers multiply positions and frequencies as matrices. TF32 has no odd
    number above 2,048, so later positions would be rounded (transformers issue 48428, on a B200).
    """
    before: list[str] = []

    def begin(*_: Any) -> None:
        before.append(torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision(_EXACT)

    def end(*_: Any) -> None:
        torch.set_float32_matmul_precision(before.pop())

    for module in model.modules():
        if "Rotary" in type(module).__name__:
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(end, always_call=True)


def products_note(training: TrainingConfig, world: World) -> str:
    """A line for the user if a setting has no effect, or if the GPU has much faster products.

    Empty if there is nothing to say.
    """
    has_tf32 = (
        world.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(world.device) >= TF32_CAPABILITY
    )
    if training.tf32:
        return "" if has_tf32 else f"training.tf32 has no effect on {world.device_name}"
    if training.precision != "32-true" or not has_tf32:
        return ""
    ways: dict[str, Products] = {
        "training.tf32: true": "tf32",
        "training.precision: bf16-mixed": "16-bit",
    }
    gpu = find_gpu(world.device_name)
    if gpu is None or not gpu.fp32_flops:
        faster = f"{' and '.join(ways)} may be several times faster"
    else:
        gains = [(way, gpu.flops(products) / gpu.fp32_flops) for way, products in ways.items()]
        texts = [f"{way} is up to {gain:.1f} times faster" for way, gain in gains if gain > _PAYS]
        faster = " and ".join(texts)
    return f"{world.device_name} multiplies fp32 matrices without tensor cores; {faster}"

"""Mixed precision of a whole model: 16-bit weights compute, fp32 weights learn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isles.dist.batch import MIXED_DTYPE
from isles.errors import UserError
from isles.strategies.fsdp import find_blocks


class MixedPrecision:
    """Puts 16-bit copies of a model's fp32 weights in the place of these weights.

    Optimizer, checkpoints and gradients keep the fp32 weights: the gradient of a copy is cast to
    fp32 and added to the gradient of its weight. FSDP2's MixedPrecisionPolicy computes the same, so
    that a run computes alike on one rank and on many. Under autocast, the residual stream would be
    fp32, and every matrix would cast its input. fp16-mixed still uses autocast, because a residual
    stream in fp16 overflows in many models.

    Args:
        model: on its device; weights that are not fp32 stay as they are.
        precision: `training.precision` of the run file; without `-mixed`, nothing is cast.
    """

    def __init__(self, model: nn.Module, precision: str, device: torch.device) -> None:
        self._dtype, self._kind = MIXED_DTYPE.get(precision), device.type
        self._has_copies = precision == "bf16-mixed"
        self._groups = _groups(model) if self._has_copies else []
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(parameter, []).append((module, name))

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Within this context the model has the copies.

        It must span the backward pass too, because gradient checkpointing computes blocks again
        there.
        """
        try:
            for group in self._groups:
                copies = _Copy.apply(self._dtype, *group)  # type: ignore[no-untyped-call]
                self._put(dict(zip(group, copies, strict=True)))
            yield
        finally:
            for group in self._groups:
                self._put(dict(zip(group, group, strict=True)))

    def forward(self) -> torch.autocast:
        """The context of a forward pass alone, within `micro_batch`."""
        enabled = self._dtype is not None and not self._has_copies
        return torch.autocast(self._kind, dtype=self._dtype, enabled=enabled)

    def _put(self, values: dict[nn.Parameter, Any]) -> None:
        for parameter, value in values.items():
            for module, name in self._places[parameter]:
                module._parameters[name] = value


def _groups(model: nn.Module) -> list[list[nn.Parameter]]:
    # The fp32 weights of each block, then of each other module: the gradients of a group are cast
    # together, and DDP can send them while earlier blocks still compute.
    try:
        blocks = find_blocks(model)
    except UserError:  # a model without blocks
        blocks = []
    seen: set[nn.Parameter] = set()
    groups = []
    for parameters in [
        *(block.parameters() for block in blocks),
        *(module.parameters(recurse=False) for module in model.modules()),
    ]:
        group = [p for p in parameters if p.dtype == torch.float32 and p not in seen]
        seen.update(group)
        if group:
            groups.append(group)
    return groups


class _Copy(torch.autograd.Function):
    # Casts of many weights, and of many gradients, in one kernel each.

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight that is not used has no gradient
        return _cast(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = zip(gradients, ctx.needs_input_grad[1:], strict=True)
        given = [gradient if needed else None for gradient, needed in wanted]
        cast = iter(_cast(tuple(x for x in given if x is not None), torch.float32))
        return None, *(None if gradient is None else next(cast) for gradient in given)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, tensors)
    return tuple(made)

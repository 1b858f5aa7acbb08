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
    stream in fp16 overflows in many models. Autocast does not know the grouped products of experts,
    so with fp16-mixed only the stacked matrices of experts get copies.

    Args:
        model: on its device; weights that are not fp32 stay as they are.
        precision: `training.precision` of the run file; without `-mixed`, nothing is cast.
    """

    def __init__(self, model: nn.Module, precision: str, device: torch.device) -> None:
        self._dtype, self._kind = MIXED_DTYPE.get(precision), device.type
        self._autocasts = precision == "fp16-mixed"
        dims = {"bf16-mixed": 0, "fp8-mixed": 0, "fp16-mixed": 3}.get(precision)
        self._groups = [] if dims is None else _groups(model, dims)
        self._copies: dict[nn.Module, tuple[Tensor, ...]] = {}
        """Copies of each module for the forward passes of this context, without gradients yet."""
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(parameter, []).append((module, name))
        disable: Any = torch.compiler.disable  # torch leaves it untyped
        self._members = {owner: group for owner, group in self._groups if owner is not None}
        for owner in self._members:
            owner.register_forward_pre_hook(disable(self._link))

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Within this context the model has the copies.

        It must span the backward pass too, because gradient checkpointing computes blocks again
        there. It may span several micro-batches, as a pipeline needs.
        """
        try:
            for owner, group in self._groups:
                with torch.no_grad():
                    copies = _cast(group, self._dtype)
                if owner is None:
                    copies = _CopyOf.apply(len(group), *group, *copies)  # type: ignore[no-untyped-call]
                else:
                    self._copies[owner] = copies
                self._put(group, copies)
            yield
        finally:
            self._copies.clear()
            for _, group in self._groups:
                self._put(group, group)

    def _link(self, owner: nn.Module, _inputs: Any) -> None:
        # Autograd goes backward in the order in which nodes were made. Linked at the start, all
        # 16-bit gradients would be kept to the end of the backward pass, and sent only then. So
        # each forward pass has its own link.
        if torch.is_grad_enabled() and (copies := self._copies.get(owner)) is not None:
            group = self._members[owner]
            self._put(group, _CopyOf.apply(len(group), *group, *copies))  # type: ignore[no-untyped-call]

    def forward(self) -> torch.autocast:
        """The context of a forward pass alone, within `micro_batch`."""
        return torch.autocast(self._kind, dtype=self._dtype, enabled=self._autocasts)

    def _put(self, group: tuple[nn.Parameter, ...], values: tuple[Any, ...]) -> None:
        for parameter, value in zip(group, values, strict=True):
            for module, name in self._places[parameter]:
                module._parameters[name] = value


def _groups(model: nn.Module, dims: int) -> list[tuple[nn.Module | None, tuple[nn.Parameter, ...]]]:
    # The fp32 weights of each block and of the head, with this module; and of each other module,
    # without it. The gradients of a group are cast together. Only weights of `dims` or more
    # dimensions.
    try:
        owners = find_blocks(model)
    except UserError:  # a model without blocks
        owners = []
    head, embedding = (
        getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("output", "input")
    )
    own = set() if embedding is None else {*embedding.parameters()}
    if head is not None and own.isdisjoint(head.parameters()):
        owners = [*owners, head]
    seen: set[nn.Parameter] = set()
    groups: list[tuple[nn.Module | None, tuple[nn.Parameter, ...]]] = []
    for owner, parameters in [
        *((module, module.parameters()) for module in owners),
        *((None, module.parameters(recurse=False)) for module in model.modules()),
    ]:
        wanted = (p for p in parameters if p.dtype == torch.float32 and p.ndim >= dims)
        group = tuple(p for p in wanted if p not in seen)
        seen.update(group)
        if group:
            groups.append((owner, group))
    return groups


class _CopyOf(torch.autograd.Function):
    # From fp32 weights to their copies; the gradients of the copies are cast in one kernel.

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight that is not used has no gradient
        return tuple(copy.detach() for copy in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(gradients)
        wanted = zip(gradients, ctx.needs_input_grad[1 : 1 + count], strict=True)
        given = [gradient if needed else None for gradient, needed in wanted]
        cast = iter(_cast(tuple(x for x in given if x is not None), torch.float32))
        own = (None if gradient is None else next(cast) for gradient in given)
        return None, *own, *[None] * count


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, tensors)
    return tuple(made)

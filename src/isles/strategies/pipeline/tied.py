"""A head that shares its weight with the embedding, when they are in different stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_tied(model: Any) -> bool:
    """True if the head of a model is its embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    return weight is not None and weight is embedding.weight


class TiedHead:
    """The weight that the first stage trains, and that the last stage has a copy of.

    The last stage sends its gradient to the first stage before each optimizer step, and gets the
    new weight after the step. So both copies are equal, bit for bit, and only the first stage has
    optimizer state.

    Args:
        stages: the stages of this rank by their number.
        last: number of the last stage.
        group: the ranks of this pipeline.
        holders: position in the group of the ranks with the first and the last stage.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        last: int,
        group: dist.ProcessGroup,
        holders: tuple[int, int],
    ) -> None:
        self._group, self._holders = group, holders
        self._first = _weight(stages[0]) if 0 in stages else None
        self._copy = _weight(stages[last]) if last in stages else None

    def hide(self, is_hidden: bool) -> None:
        """Hide the copy from code that looks for weights to train, or show it again."""
        if self._copy is not None:
            self._copy.requires_grad_(not is_hidden)

    @torch.no_grad()
    def send_gradient(self) -> None:
        """Add the copy's gradient to the first stage's. All ranks must call this."""
        gradient: Tensor | None = None
        if self._copy is not None:
            assert self._copy.grad is not None
            gradient, self._copy.grad = _local(self._copy.grad), None
        if self._first is not None:
            assert self._first.grad is not None
            own = _local(self._first.grad)
            own.add_(self._moved(gradient, own, *reversed(self._holders)))
        elif gradient is not None:
            self._moved(gradient, gradient, *reversed(self._holders))

    @torch.no_grad()
    def send_weight(self) -> None:
        """Copy the first stage's weight to the last stage. All ranks must call this."""
        weight = None if self._first is None else _local(self._first)
        if self._copy is not None:
            own = _local(self._copy)
            own.copy_(self._moved(weight, own, *self._holders))
        elif weight is not None:
            self._moved(weight, weight, *self._holders)

    def _moved(self, given: Tensor | None, like: Tensor, source: int, target: int) -> Tensor:
        # The tensor of the source, on the source and on the target.
        if source == target:
            assert given is not None
            return given
        if given is not None:
            dist.send(given.contiguous(), group=self._group, group_dst=target)
            return given
        found = torch.empty_like(like)
        dist.recv(found, group=self._group, group_src=source)
        return found


def forget_embedding(stage: Any) -> None:
    """Save a tied head under the head's name alone: the first stage saves the embedding."""
    name = next(
        name for name, module in stage.named_modules() if module is stage.get_input_embeddings()
    )

    def forget(_module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
        state.pop(f"{prefix}{name}.weight", None)

    stage._register_state_dict_hook(forget)


def _weight(stage: Any) -> nn.Parameter:
    weight: nn.Parameter = stage.base_model.embed_tokens.weight
    return weight


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""A head that shares its weight with the embedding, when they are in different stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isles.facts.memory.setting import BUCKET_NUMBERS


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
        first, last = self._holders
        gradient: Tensor | None = None
        if self._copy is not None:
            assert self._copy.grad is not None
            gradient, self._copy.grad = _local(self._copy.grad), None
        if self._first is not None:
            assert self._first.grad is not None
            own = _local(self._first.grad)
            if gradient is not None:
                own.add_(gradient)
                return
            # A buffer for the whole gradient would be as large as the embedding.
            for part in _parts(own):
                part.add_(self._received(torch.empty_like(part), last))
        elif gradient is not None:
            self._send(gradient, first)

    @torch.no_grad()
    def send_weight(self) -> None:
        """Copy the first stage's weight to the last stage. All ranks must call this."""
        first, last = self._holders
        weight = None if self._first is None else _local(self._first)
        if self._copy is not None:
            own = _local(self._copy)
            if weight is not None:
                own.copy_(weight)
                return
            for part in _parts(own):
                self._received(part, first)
        elif weight is not None:
            self._send(weight, last)

    def _send(self, tensor: Tensor, target: int) -> None:
        for part in _parts(tensor):
            dist.send(part.contiguous(), group=self._group, group_dst=target)

    def _received(self, buffer: Tensor, source: int) -> Tensor:
        # The tensor that `_send` of another rank sends, in this buffer.
        dist.recv(buffer, group=self._group, group_src=source)
        return buffer


def _parts(tensor: Tensor) -> list[Tensor]:
    # Whole rows of a tensor, as many as are sent together. An uneven shard may have no rows.
    if not tensor.numel():
        return []
    return list(torch.split(tensor, max(1, BUCKET_NUMBERS // tensor[0].numel())))


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

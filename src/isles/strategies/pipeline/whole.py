"""Stages that each of their ranks holds whole, without FSDP2.

FSDP2 over a single rank would gather each weight into a second buffer, frozen weights too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isles.facts.memory.setting import BUCKET_NUMBERS
from isles.strategies.mixed_precision import MixedPrecision


class WholeStages:
    """Computing and gradients of whole stages.

    Args:
        peers: the ranks that hold the same stages and read other rows. None: this rank alone.
    """

    def __init__(self, device: torch.device, precision: str, peers: dist.ProcessGroup | None):
        self._device, self._precision, self._peers = device, precision, peers
        self._stages: list[MixedPrecision] = []

    def add(self, stage: Any, materialize: Callable[[nn.Module], None]) -> None:
        """Allocate and fill a stage from the meta device."""
        _allocate(stage, self._device)
        materialize(stage)
        self._stages.append(MixedPrecision(stage, self._precision, self._device))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Within this context the stages compute in the run's precision."""
        with contextlib.ExitStack() as stack:
            for stage in self._stages:
                stack.enter_context(stage.micro_batch())
            yield

    @torch.no_grad()
    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all peers. All ranks must call this."""
        if self._peers is None:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_type.values():
            for bucket in _buckets(gradients):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    # No second buffer for it, which may be as large as an embedding.
                    dist.all_reduce(bucket[0], group=self._peers)
                    continue
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                dist.all_reduce(flat, group=self._peers)
                parts = torch.split(flat, [gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))


def _allocate(stage: nn.Module, device: torch.device) -> None:
    # Not by `to_empty`, which makes two weights of a tied one.
    made: dict[Tensor, nn.Parameter] = {}
    for module in stage.modules():
        for name, own in module._parameters.items():
            if own is not None:
                if own not in made:
                    empty = torch.empty_like(own, device=device)
                    made[own] = nn.Parameter(empty, requires_grad=own.requires_grad)
                module._parameters[name] = made[own]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    # At most `BUCKET_NUMBERS` in each, unless it is a single larger gradient.
    bucket: list[Tensor] = []
    numbers = 0
    for gradient in gradients:
        if bucket and numbers + gradient.numel() > BUCKET_NUMBERS:
            yield bucket
            bucket, numbers = [], 0
        bucket.append(gradient)
        numbers += gradient.numel()
    if bucket:
        yield bucket

"""Arithmetic on state in main memory, block by block on the device of the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_CPU = torch.device("cpu")
_CPU_NUMBERS, _GPU_NUMBERS = 1 << 20, 1 << 24
"""Numbers of a block. A CPU's cache should keep the block. On a GPU, about ten blocks of fp32 need
memory while a training step runs. A block of this size reaches the speed of PCIe."""


class Staging:
    """Copies blocks of main memory to a device and back. Not thread-safe.

    For a GPU, two pinned buffers take turns: the GPU copies the first while the CPU uses the
    second. The memory of the state itself stays pageable. On other devices, nothing is staged.

    Args:
        device: the device that computes.
        is_staged: whether to copy through buffers. Default: if the device is a GPU.
    """

    def __init__(self, device: torch.device, *, is_staged: bool | None = None) -> None:
        self.device = device
        self._is_staged = device.type == "cuda" if is_staged is None else is_staged
        self._is_cuda = device.type == "cuda"
        self._buffers: list[_Buffer] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def block_numbers(self) -> int:
        """Maximum numbers of a block."""
        return _GPU_NUMBERS if self._is_staged else _CPU_NUMBERS

    @contextmanager
    def open(self, *, is_aside: bool = False) -> Iterator[None]:
        """Complete all copies at the end.

        Args:
            is_aside: use a separate stream, so that training steps may run at the same time. The
                blocks must not depend on pending work of other streams.
        """
        with self._aside() if is_aside else nullcontext():
            try:
                yield
                for buffer in self._buffers:
                    buffer.finish()
            finally:
                for buffer in self._buffers:
                    buffer.goal = None

    def _aside(self) -> AbstractContextManager[Any]:
        if not self._is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)

    def compute(
        self, block: Callable[Concatenate[Staging, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `block(self, ...)`; if the GPU has too little memory, compute on the CPU from now
        on. The results are equal.

        Args:
            block: it must call `put` only after its last allocation on the device.
        """
        try:
            return block(self, *args, **kwargs)
        except torch.OutOfMemoryError:
            if not self._is_staged:
                raise
        log.warning(
            "outer: the GPU has no memory for a block of %d numbers, so the CPU computes the outer "
            "steps from now on",
            self.block_numbers,
        )
        for buffer in self._buffers:
            buffer.finish()
        self.device, self._is_staged, self._buffers = _CPU, False, []
        return block(self, *args, **kwargs)

    def bring(self, source: Tensor, goal: Tensor | None = None) -> Tensor:
        """A tensor on the device with the values of contiguous main memory.

        Args:
            goal: use this tensor. Without it, the result is the source itself if nothing is staged.
        """
        if goal is None:
            if not self._is_staged:
                return source
            goal = torch.empty_like(source, device=self.device)
        if not self._is_staged:
            return goal.copy_(source)
        for own, other in self._parts(source, goal):
            buffer = self._next()
            staged = buffer.view(own)
            staged.copy_(own)
            other.copy_(staged, non_blocking=True)
            buffer.mark()
        return goal

    def put(self, source: Tensor, goal: Tensor) -> None:
        """Copy a contiguous tensor of the device to main memory, at the end of `open` at the
        latest."""
        if not self._is_staged:
            if source.data_ptr() != goal.data_ptr():
                goal.copy_(source)
            return
        for own, other in self._parts(source, goal):
            buffer = self._next()
            buffer.view(own).copy_(own, non_blocking=True)
            buffer.mark(other)

    def _parts(self, source: Tensor, goal: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = 4 * _GPU_NUMBERS // source.element_size()
        own, other = source.view(-1), goal.view(-1)
        yield from zip(torch.split(own, numbers), torch.split(other, numbers), strict=True)

    def _next(self) -> _Buffer:
        if not self._buffers:
            self._buffers = [_Buffer(self.device) for _ in range(2)]
        self._buffers.reverse()
        self._buffers[0].finish()
        return self._buffers[0]


class _Buffer:
    # Pinned memory. `goal`: where its content goes when the GPU has written it.

    def __init__(self, device: torch.device) -> None:
        self._device, self._copied = device, None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._bytes = torch.empty(
            4 * _GPU_NUMBERS, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self.goal: Tensor | None = None

    def view(self, like: Tensor) -> Tensor:
        return self._bytes[: like.nbytes].view(like.dtype)

    def mark(self, goal: Tensor | None = None) -> None:
        # The copy from or to the buffer is on its way.
        self.goal = goal
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        if self.goal is not None:
            goal, self.goal = self.goal, None
            goal.copy_(self.view(goal))

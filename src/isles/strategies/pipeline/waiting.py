"""The time that a rank of a pipeline waits during a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage


class Waiting:
    """Time of a step outside the stages of this rank: its bubbles, waits for other ranks, and
    messages after the backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._computed: list[tuple[Any, Any]] = []
        self._sent: list[tuple[Any, Any]] = []
        self._step: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Time within this block is not waiting."""
        began = self._mark()
        yield
        self._computed.append((began, self._mark()))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The forward and backward passes of a step."""
        self._computed.clear()
        self._sent.clear()
        began = self._mark()
        yield
        self._step = began, self._mark()

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Time within this block, after the passes of a step, is waiting."""
        began = self._mark()
        yield
        self._sent.append((began, self._mark()))

    def seconds(self) -> float | None:
        """Seconds that this rank waited during the last step. None before the first step. Waits for
        the GPU."""
        if self._step is None:
            return None
        if self._cuda:
            (self._sent or [self._step])[-1][1].synchronize()
        computed_s = sum(map(self._between, self._computed))
        sent_s = sum(map(self._between, self._sent))
        return max(0.0, self._between(self._step) - computed_s) + sent_s

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        # In the GPU's stream, which waits there for messages of other ranks.
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, marks: tuple[Any, Any]) -> float:
        began, ended = marks
        return float(began.elapsed_time(ended) / 1e3 if self._cuda else ended - began)


class TimedStage(PipelineStage):
    """A stage of torch's schedules, with its passes timed."""

    waiting: Waiting

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See PipelineStage."""
        with self.waiting.computing():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See PipelineStage."""
        with self.waiting.computing():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See PipelineStage."""
        with self.waiting.computing():
            return super().backward_weight_one_chunk(*args, **kwargs)

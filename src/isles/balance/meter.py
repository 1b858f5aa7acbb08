"""Times a rank's own computing inside the real engine, without waiting for anything.

Forward hooks around the blocks: what a strategy gathers before a block, and what it waits for
between two, is not in it. The backward pass takes its usual multiple and is not looked at.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

_SAMPLE_EVERY = 5
"""Steps from one whose blocks are timed to the next on CUDA, where an event costs a little."""

_EACH_UP_TO = 10
"""Steps that are all timed, after a start or a change of rows: an early look must have some."""

_WARMUP = 2
"""First steps of a start, which allocate and compile, and are left out."""


class ComputeMeter:
    """Seconds of the forward passes of some modules, in each step.

    Args:
        modules: each of which computes and never waits; none inside another.
        device: where they compute.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: list[float] = []
        self._events: list[list[tuple[Any, Any]]] = []
        self._now = 0.0
        self._pairs: list[tuple[Any, Any]] = []
        self._since: Any = None
        self._step = -_WARMUP
        for module in modules:
            # After the strategy's own hooks before the block, and ahead of those behind it.
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, prepend=True)

    def step_done(self) -> None:
        """A step is over."""
        if self._step >= 0:
            if self._pairs:
                self._events.append(self._pairs)
            if not self._cuda:
                self._steps.append(self._now)
        self._now, self._pairs = 0.0, []
        self._step += 1

    def steps(self) -> list[float]:
        """Seconds of each step that was timed since the last `reset`, in order. Waits for no GPU:
        steps that it has not finished yet are left out."""
        while self._events and self._events[0][-1][1].query():
            pairs = self._events.pop(0)
            self._steps.append(sum(a.elapsed_time(b) for a, b in pairs) / 1e3)
        return list(self._steps)

    def reset(self) -> None:
        """Forget what was timed so far."""
        self._steps.clear()
        self._events.clear()
        self._step = 0

    @property
    def _is_timed(self) -> bool:
        return 0 <= self._step < _EACH_UP_TO or self._step % _SAMPLE_EVERY == 0

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        self._since = None
        if not module.training:
            return
        if not self._cuda:
            self._since = _own_seconds()
        elif self._is_timed:
            self._since = _mark()

    def _end(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._since is None:
            return
        if self._cuda:
            self._pairs.append((self._since, _mark()))
        else:
            self._now += _own_seconds() - self._since
        self._since = None


def _own_seconds() -> float:
    # A clock that stands still while this thread could run and other work has its processor. A
    # device that is slow, or stopped again and again, is slow by it; one that is shared for a while
    # is not. https://docs.kernel.org/scheduler/sched-stats.html: /proc/<pid>/schedstat
    try:
        waited_ns = int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError):
        waited_ns = 0  # a kernel without these figures
    return time.perf_counter() - waited_ns / 1e9


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

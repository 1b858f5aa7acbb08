"""Measures ranks: before training with small models, and during training by its steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from isles.balance.curve import Curve
from isles.dist.world import World

_ROUNDS = 3
"""Fewest rounds, if passes are short."""

_WINDOW_S = 0.06
"""Seconds for one size in one round: several periods of bursts that slow a machine down."""

_AGREE = 1.10
"""Largest ratio between the two fastest rounds at any size. Noise only makes a pass slower, so two
rounds that agree have no noise."""

_BUDGET_S = 8.0
"""Limit in seconds for all rounds and sizes of one model. After it the ranks have not settled."""

_SAMPLE_EVERY = 5
"""Interval of the steps with timed blocks on CUDA, as an event costs some time."""

_EACH_UP_TO = 10
"""First steps after a start or a change of rows, all timed so that the first review has data."""

_TRIES = 100
"""Most attempts to read two clocks without an interruption of the thread."""

_WARMUP = 2
"""First steps of an attempt to ignore, as they allocate and compile."""


def compute_until_all_are_here(work: Callable[[], object], world: World) -> None:
    """Repeat `work` until all ranks have called this function. Collective."""
    others = dist.barrier(group=world.control, async_op=True)
    assert others is not None  # never None, as this rank is in the group
    while not others.is_completed():
        work()
    others.wait()


@dataclass(frozen=True, slots=True)
class Probe:
    """A small model that represents a larger model of the same shape.

    Args:
        make: makes a model with the given number of layers, on the device, in train mode. Called
            with tokens [B, T], it runs a forward and a backward pass in the run's precision.
        layers: layers of the real model.
        vocab_size, seq_length: vocabulary and length of the tokens.
        device: device to measure.
        share: share of the real model's work for one rank, as tensor, context and pipeline
            parallel ranks divide the work.
        kept: micro-batches whose activations a rank of a pipeline keeps at the same time.
        world: ranks that measure at the same time, as they also train at the same time. Some may
            share processors without torch's knowledge, as virtual machines on one computer do. A
            rank that measures alone would then seem too fast. None: no such ranks.
    """

    make: Callable[[int], nn.Module]
    layers: int
    vocab_size: int
    seq_length: int
    device: torch.device
    share: float
    kept: int = 1
    world: World | None = None


def calibrate(
    probe: Probe, sizes: Sequence[int], *, free_bytes: float | None
) -> tuple[Curve, bool]:
    """Measure this rank. Returns its curve, and whether the times settled. Keeps random states.

    Sizes are timed in rounds until the two fastest rounds agree, or the time limit is reached. With
    a world, all its ranks must call this.

    Args:
        probe: the model and its device.
        sizes: micro-batch sizes to try, ascending. The last is the largest useful size.
        free_bytes: memory for activations on this rank. None: no limit, as on a CPU.

    Raises:
        torch.OutOfMemoryError: not even one row of the smallest probe fits.
    """
    devices = [probe.device] if probe.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        depths = sorted({min(1, probe.layers), min(2, probe.layers)})
        found = []
        for depth in depths:
            model = probe.make(depth)
            found.append(_measure(model, probe, sizes, free_bytes))
            del model
            if probe.device.type == "cuda":
                torch.cuda.empty_cache()
    (shallow_s, shallow_bytes, _), (deep_s, deep_bytes, _) = found[0], found[-1]
    more = (probe.layers - depths[-1]) if len(depths) > 1 else 0
    seconds, size_bytes = {}, {}
    for size in sorted(shallow_s.keys() & deep_s.keys()):
        # With much noise, two layers may have been measured as fast as one.
        per_layer_s = max(0.0, deep_s[size] - shallow_s[size])
        seconds[size] = (deep_s[size] + more * per_layer_s) * probe.share
        per_layer = max(0, deep_bytes[size] - shallow_bytes[size])
        size_bytes[size] = (deep_bytes[size] + more * per_layer) * probe.share * probe.kept
    limit = sizes[-1]
    if free_bytes is not None:
        limit = rows_that_fit(size_bytes, free_bytes, sizes[-1])
    return Curve.of(seconds, max(1, limit)), all(is_settled for _, _, is_settled in found)


def rows_that_fit(bytes_by_rows: dict[int, float], free_bytes: float, most: int) -> int:
    """Most rows whose activations fit, by the line through the two largest measured sizes. 0: none
    fits."""
    sizes = sorted(bytes_by_rows)
    last = sizes[-1]
    before = sizes[-2] if len(sizes) > 1 else 0
    base = bytes_by_rows.get(before, 0.0)
    slope = max(1.0, (bytes_by_rows[last] - base) / (last - before))
    fit = int((free_bytes - bytes_by_rows[last]) // slope) + last
    return max(0, min(most, fit))


def settled(rounds: Sequence[Sequence[float]]) -> bool:
    """True if the two fastest rounds agree. `rounds` has the seconds of each size per round."""
    if not rounds or min(map(len, rounds)) < 2:
        return False
    fastest = (sorted(seconds)[:2] for seconds in rounds)
    return all(second <= _AGREE * first for first, second in fastest)


def _measure(
    model: nn.Module, probe: Probe, sizes: Sequence[int], free_bytes: float | None
) -> tuple[dict[int, float], dict[int, int], bool]:
    # Returns seconds and bytes by rows, and whether the seconds settled. Sizes grow until memory is
    # full. Then all sizes are timed in turn, so that noise affects all of them equally.
    began = time.perf_counter()
    bytes_by_size: dict[int, int] = {}
    guesses: dict[int, float] = {}
    for size in sizes:
        try:
            _pass(model, probe, size)  # makes the gradients, compiles kernels
            bytes_by_size[size], guesses[size] = _peak(model, probe, size)
        except torch.OutOfMemoryError:
            if not guesses:
                raise
            break  # the limit follows from the smaller sizes
        if free_bytes is not None and 2 * bytes_by_size[size] > free_bytes:
            break
        if time.perf_counter() - began > _BUDGET_S / 2:
            break
    rounds: dict[int, list[float]] = {size: [] for size in guesses}
    for done in itertools.count(1):
        if probe.world is not None:
            dist.barrier(group=probe.world.control)
        for size, guess in guesses.items():
            if time.perf_counter() - began > _BUDGET_S:
                break
            rounds[size].append(_window(model, probe, size, guess))
        if probe.world is not None:
            # A rank that is done keeps computing, as in training: else others would seem faster.
            compute_until_all_are_here(lambda: _pass(model, probe, min(guesses)), probe.world)
        is_settled = settled(list(rounds.values()))
        is_done = is_settled and done >= _ROUNDS
        is_done = is_done or time.perf_counter() - began > _BUDGET_S
        if probe.world is not None:
            is_done = all(probe.world.gather(is_done))
        if is_done:
            break
    seconds = {size: min(rounds[size], default=guesses[size]) for size in guesses}
    return seconds, bytes_by_size, is_settled


def _window(model: nn.Module, probe: Probe, size: int, guess: float) -> float:
    began = _now(probe)
    if probe.device.type == "cpu":
        for done in itertools.count(1):
            _pass(model, probe, size)
            if (seconds := _now(probe) - began) >= _WINDOW_S:
                return seconds / done
    count = max(1, int(_WINDOW_S / guess))
    for _ in range(count):
        _pass(model, probe, size)
    return (_now(probe) - began) / count


def _peak(model: nn.Module, probe: Probe, size: int) -> tuple[int, float]:
    # Bytes of a pass on a GPU, and its seconds.
    is_gpu = probe.device.type == "cuda"
    base = torch.cuda.memory_allocated(probe.device) if is_gpu else 0
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(probe.device)
    began = _now(probe)
    _pass(model, probe, size)
    seconds = _now(probe) - began
    peak = torch.cuda.max_memory_allocated(probe.device) if is_gpu else 0
    return peak - base, seconds


def _now(probe: Probe) -> float:
    if probe.device.type == "cuda":
        torch.cuda.synchronize(probe.device)
    return time.perf_counter()


def _pass(model: nn.Module, probe: Probe, rows: int) -> None:
    # One forward and backward pass on arbitrary tokens, as an engine does it.
    tokens_BT = torch.arange(rows * probe.seq_length, device=probe.device) % probe.vocab_size
    tokens_BT = tokens_BT.view(rows, probe.seq_length)
    model(tokens_BT)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


class ComputeMeter:
    """Seconds of the forward passes of some modules in each step, inside the real engine.

    Hooks time the blocks alone. The strategy's gathering before a block, and waits between two
    blocks, are not included. The backward pass is not timed, as it is a multiple of the forward.

    Args:
        modules: modules that compute and never wait. None contains another.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: list[float] = []
        self._events: list[list[tuple[Any, Any]]] = []
        self._now = 0.0
        self._pairs: list[tuple[Any, Any]] = []
        self._since: Any = None
        self._step = -_WARMUP
        disable: Any = torch.compiler.disable  # torch leaves it untyped
        for module in modules:
            # Run after the strategy's hooks before the block, and before its hooks after the block.
            # A compiled module calls them as they are, before and after its graph.
            module.register_forward_pre_hook(disable(self._begin))
            module.register_forward_hook(disable(self._end), prepend=True)

    def step_done(self, *, counts: bool = True) -> None:
        """End a step. `counts`: whether the step had all its rows."""
        if self._step >= 0 and counts:
            if self._pairs:
                self._events.append(self._pairs)
            if not self._cuda:
                self._steps.append(self._now)
        self._now, self._pairs = 0.0, []
        self._step += 1

    def steps(self) -> list[float]:
        """Seconds of each timed step since the last `reset`, in order. Does not wait for a GPU, so
        steps that the GPU has not finished are missing."""
        while self._events and self._events[0][-1][1].query():
            pairs = self._events.pop(0)
            self._steps.append(sum(a.elapsed_time(b) for a, b in pairs) / 1e3)
        return list(self._steps)

    def reset(self) -> None:
        """Delete all times."""
        self._steps.clear()
        self._events.clear()
        self._step = 0

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        self._since = None
        if not module.training:
            return
        if not self._cuda:
            self._since = _own_seconds()
        elif 0 <= self._step < _EACH_UP_TO or self._step % _SAMPLE_EVERY == 0:
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
    # A clock that stops while the thread could run but another program has its processor. A
    # device that is always slow, or often interrupted, is also slow by this clock. A device that
    # other work shares for a while is not. See /proc/<pid>/schedstat in
    # https://docs.kernel.org/scheduler/sched-stats.html
    waited_ns, now = _waited_ns(), 0.0
    for _ in range(_TRIES):
        now = time.perf_counter()
        again_ns = _waited_ns()
        if again_ns == waited_ns:
            break
        waited_ns = again_ns  # the thread waited between the two clocks
    return now - waited_ns / 1e9


def _waited_ns() -> int:
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError):
        return 0  # this kernel does not have these figures


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

"""How fast this rank computes, and how many rows fit: measured on small models of few layers."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from isles.balance.curve import Curve
from isles.dist.measure import Company
from isles.run.records import read_record, write_record

_ROUNDS = 3
"""At least, where passes are short."""

_WINDOW_S = 0.06
"""Of one size in one round: several periods of whatever slows a machine in bursts."""

_AGREE = 1.10
"""The two fastest rounds must not differ by more at any size: noise only makes a pass slower, and
what two rounds have found is none."""

_BUDGET_S = 8.0
"""Of all rounds and sizes of one model, after which the ranks have not settled."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A model that stands for a larger one of the same shape.

    Args:
        make: makes a model with so many layers, on the device, in train mode, that gives the loss
            of tokens [B, T].
        layers: of the real model.
        vocab_size, seq_length: of the tokens.
        autocast: type of the matrix products under mixed precision, or None.
        device: where it is measured.
        share: part of the real model's work that falls to one rank (tensor, context and pipeline
            parallel ranks share it).
        company: for ranks that may share processors; None: they share nothing.
    """

    make: Callable[[int], nn.Module]
    layers: int
    vocab_size: int
    seq_length: int
    autocast: torch.dtype | None
    device: torch.device
    share: float
    company: Company | None = None


@dataclass(slots=True)
class Measured:
    """Figures of one probe model, by rows."""

    seconds: dict[int, float]
    bytes: dict[int, int]
    is_settled: bool


def calibrate(
    probe: Probe, sizes: Sequence[int], *, free_bytes: float | None
) -> tuple[Curve, bool]:
    """Measure this rank, and whether it settled. Random states stay as they are.

    Sizes are timed in rounds until the two fastest agree, or the time for it is over. No rank waits
    for another in it, unless there is company: then all ranks must call this.

    Args:
        probe: what to measure with.
        sizes: of micro-batches to try, ascending, the last one the most that is of use.
        free_bytes: left for activations on this rank; None: memory is no limit, as on a CPU.

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
    shallow, deep = found[0], found[-1]
    more = (probe.layers - depths[-1]) if len(depths) > 1 else 0
    seconds, size_bytes = {}, {}
    for size in sorted(shallow.seconds.keys() & deep.seconds.keys()):
        one, two = shallow.seconds[size], deep.seconds[size]
        # Two layers may have been measured as no slower than one, on a machine full of noise.
        seconds[size] = (two + more * max(0.0, two - one)) * probe.share
        per_layer = max(0, deep.bytes[size] - shallow.bytes[size])
        size_bytes[size] = (deep.bytes[size] + more * per_layer) * probe.share
    limit = sizes[-1]
    if free_bytes is not None:
        limit = rows_that_fit(size_bytes, free_bytes, sizes[-1])
    return Curve.of(seconds, max(1, limit)), all(each.is_settled for each in found)


def rows_that_fit(bytes_by_rows: dict[int, float], free_bytes: float, most: int) -> int:
    """The most rows whose activations fit, by the line through the two largest that were measured;
    0: not even one."""
    sizes = sorted(bytes_by_rows)
    last = sizes[-1]
    before = sizes[-2] if len(sizes) > 1 else 0
    base = bytes_by_rows.get(before, 0.0)
    slope = max(1.0, (bytes_by_rows[last] - base) / (last - before))
    fit = int((free_bytes - bytes_by_rows[last]) // slope) + last
    return max(0, min(most, fit))


def settled(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether the two fastest rounds of every size agree. Pure.

    Args:
        rounds: for each size, its seconds round by round.
    """
    if not rounds or min(map(len, rounds)) < 2:
        return False
    fastest = (sorted(seconds)[:2] for seconds in rounds)
    return all(second <= _AGREE * first for first, second in fastest)


def _measure(
    model: nn.Module, probe: Probe, sizes: Sequence[int], free_bytes: float | None
) -> Measured:
    # Grow until memory ends, then time all sizes in turn, so that noise falls on all alike.
    began = time.perf_counter()
    bytes_by_size, guesses = _grow(model, probe, sizes, free_bytes, began)
    rounds: dict[int, list[float]] = {size: [] for size in guesses}
    for done in itertools.count(1):
        if probe.company is not None:
            probe.company.begin()
        for size in guesses:
            if time.perf_counter() - began > _BUDGET_S:
                break
            rounds[size].append(_window(model, probe, size, guesses[size]))
        if probe.company is not None:
            # Who is done must not leave the processors to the others: in training it will not.
            probe.company.go_on(lambda: _pass(model, probe, min(guesses)))
        is_settled = settled(list(rounds.values()))
        is_done = is_settled and done >= _ROUNDS
        is_done = is_done or time.perf_counter() - began > _BUDGET_S
        if probe.company is not None:
            is_done = probe.company.all_say(is_done)
        if is_done:
            break
    seconds = {size: min(rounds[size], default=guesses[size]) for size in guesses}
    return Measured(seconds, bytes_by_size, is_settled)


def _grow(
    model: nn.Module, probe: Probe, sizes: Sequence[int], free_bytes: float | None, began: float
) -> tuple[dict[int, int], dict[int, float]]:
    bytes_by_size: dict[int, int] = {}
    guesses: dict[int, float] = {}
    for size in sizes:
        try:
            _pass(model, probe, size)  # makes the gradients, compiles kernels
            bytes_by_size[size], guesses[size] = _peak(model, probe, size)
        except torch.OutOfMemoryError:
            if not guesses:
                raise
            break  # the limit follows from the sizes before
        if free_bytes is not None and 2 * bytes_by_size[size] > free_bytes:
            break
        if time.perf_counter() - began > _BUDGET_S / 2:
            break
    return bytes_by_size, guesses


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
    if probe.device.type != "cuda":
        began = _now(probe)
        _pass(model, probe, size)
        return 0, _now(probe) - began
    base = torch.cuda.memory_allocated(probe.device)
    torch.cuda.reset_peak_memory_stats(probe.device)
    began = _now(probe)
    _pass(model, probe, size)
    seconds = _now(probe) - began
    return torch.cuda.max_memory_allocated(probe.device) - base, seconds


def _now(probe: Probe) -> float:
    if probe.device.type == "cuda":
        torch.cuda.synchronize(probe.device)
    return time.perf_counter()


def _pass(model: nn.Module, probe: Probe, rows: int) -> None:
    # One forward and backward pass on tokens that mean nothing, as an engine does it.
    tokens_BT = torch.arange(rows * probe.seq_length, device=probe.device) % probe.vocab_size
    tokens_BT = tokens_BT.view(rows, probe.seq_length)
    with torch.autocast(
        probe.device.type, dtype=probe.autocast, enabled=probe.autocast is not None
    ):
        loss = model(tokens_BT)
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def curve_file(folder: Path, key: dict[str, object]) -> Path:
    """Where the curve for a device and a model is kept.

    Args:
        folder: the cache.
        key: all that the curve depends on.
    """
    text = json.dumps(key, sort_keys=True, default=str)
    return folder / "curves" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_curve(file: Path) -> Curve | None:
    """A curve that was kept, or None."""
    record = read_record(file)
    try:
        return None if record is None else Curve.read(record)
    except (KeyError, TypeError, ValueError, AssertionError):
        return None  # of another version: measured anew, and overwritten


def keep_curve(file: Path, curve: Curve) -> None:
    """Keep a curve; a cache that cannot be written costs only time."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_record(file, curve.record(), durable=False)

"""Seconds of computing and of communication, by what a card and a link can do at most.

A micro-batch takes as long as its matrix products take at a share of the card's table speed, plus
as long as the rest takes to go through the card's memory, and no less than its kernels take to
launch. The three constants are guesses, and `ASSUMPTIONS` says so; what is measured in a run goes
before them.
"""

from __future__ import annotations

from dataclasses import dataclass

from isles.config.layout import Layout, Strategy
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.facts.memory.step import Count
from isles.plan.machines import Device, Machines
from isles.plan.model import forward_flops

MATMUL_SHARE = 0.5
"""Of a card's table speed, what matrix products of a training step reach."""

PASSES = {False: 10.0, True: 5.0}
"""How often what the backward pass needs goes through the card's memory, both ways together: as
written, and under torch.compile, which fuses the operations between matrix products."""

LAUNCHES = {False: 160, True: 50}
"""Kernels of a block, forward and backward."""

LAUNCH_S = 5e-6
PCIE = 10e9
HOST_BANDWIDTH = 20e9
"""Bytes a second of main memory that the optimizer of an offloaded model reaches."""

ASSUMPTIONS = (
    f"matrix products reach {MATMUL_SHARE:.0%} of a card's table speed; what is kept for the "
    f"backward pass goes {PASSES[False]:.0f} times through its memory (torch.compile: "
    f"{PASSES[True]:.0f}); a kernel takes {LAUNCH_S * 1e6:.0f} µs to launch",
    "communication of blocks hides behind the micro-batch, gradients behind the last backward pass",
    f"cards without NVLink exchange {PCIE / 1e9:.0f} GB/s, with it 80 % of its rate",
)

_STATE_BYTES = {"adamw": 16, "muon": 12, "sgd": 8, "adamw_8bit": 4}
"""Read and written of the optimizer's state for each weight."""


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch on one rank.

    Args:
        flops: made, with what is computed again.
        traffic: bytes through the card's memory beside matrix products.
        launches: kernels.
        forward_share: of the time, that is not the backward pass.
    """

    flops: float
    traffic: float
    launches: float
    forward_share: float = 1 / 3

    def seconds(self, device: Device, *, is_narrow: bool) -> float | None:
        """On a device; None where its speed is not known."""
        flops = device.flops if is_narrow else device.fp32_flops
        if not flops or not device.bandwidth:
            return None
        computing = self.flops / (flops * MATMUL_SHARE) + self.traffic / device.bandwidth
        return max(computing, self.launches * LAUNCH_S if device.is_cuda else 0.0)


def work_of(count: Count, layout: Layout, *, is_compiled: bool) -> Work:
    """The work of a micro-batch on a rank."""
    model, setting, holding = count.model, count.setting, count.holding
    cut = layout.tp * layout.pp
    products, attention = forward_flops(count)
    backward = products * (2.0 if setting.is_whole else 1.0) + 2.0 * attention
    again = products + attention if setting.checkpointing == "full" else 0.0
    kept = model.layers * count.block.saved_bytes
    passes = (
        PASSES[is_compiled] * {"none": 1.0, "selective": 1.2, "full": 1.3}[setting.checkpointing]
    )
    weights = count.params * setting.compute_width * 3.0
    if setting.is_mixed and setting.is_whole and not holding.casts_whole:
        weights += count.params * 6.0  # autocast reads fp32 and writes 16 bits
    if setting.block_bits:
        # 4 bits are made 16 for each product: read, write, read.
        visits = 3.0 if setting.checkpointing == "full" else 2.0
        weights += visits * model.layers * count.block.params * (setting.block_bits / 8 + 2)
    launches = LAUNCHES[is_compiled] * model.layers / layout.pp
    flops = products + attention + backward + again
    return Work(
        flops / cut,
        (kept * passes + weights) / cut,
        launches,
        (products + attention) / flops,
    )


def optimizer_seconds(count: Count, device: Device, layout: Layout) -> float:
    """The optimizer's step and clipping: each weight, gradient and state once through memory."""
    setting, holding = count.setting, count.holding
    numbers = count.trained / (layout.tp * layout.pp * holding.state)
    per_number = _STATE_BYTES[setting.optimizer] + 4 * setting.trained_width
    if setting.optimizer == "adamw" and setting.trained_width == 2:
        per_number -= 8
    if holding.offloads_state:
        ranks = 1 if not device.is_cuda else max(1, layout.world_size // holding.state)
        return numbers * per_number * ranks / HOST_BANDWIDTH
    return numbers * per_number / (device.bandwidth or HOST_BANDWIDTH)


@dataclass(frozen=True, slots=True)
class Communication:
    """What one rank sends in a step, and how long it takes.

    Args:
        micro_s: in each micro-step, hidden behind it as far as it goes.
        bare_s: in each micro-step, with nothing to hide behind.
        step_s: once a step, hidden behind the last backward pass.
        copy_s: in each micro-step, between main memory and the card.
        sent_bytes: by one rank in a step of so many micro-steps.
        line_bytes: of them and those of its neighbours, what goes over the line of a host.
    """

    micro_s: float
    bare_s: float
    step_s: float
    copy_s: float
    sent_bytes: float
    line_bytes: float

    def exposed_s(self, micro_steps: int, micro_step_s: float, backward_share: float) -> float:
        """Seconds of a step that computing does not hide."""
        hidden = max(0.0, self.micro_s - micro_step_s) * micro_steps
        last = max(0.0, self.step_s - micro_step_s * backward_share)
        return hidden + last + (self.bare_s + self.copy_s) * micro_steps


@dataclass(frozen=True, slots=True)
class _Sent:
    # What a collective takes: seconds, and bytes of a rank and of the line of a host.
    seconds: float = 0.0
    rank_bytes: float = 0.0
    line_bytes: float = 0.0

    def __add__(self, other: _Sent) -> _Sent:
        return _Sent(
            self.seconds + other.seconds,
            self.rank_bytes + other.rank_bytes,
            self.line_bytes + other.line_bytes,
        )

    def times(self, count: float) -> _Sent:
        return _Sent(self.seconds * count, self.rank_bytes * count, self.line_bytes * count)


class _Group:
    # Ranks that exchange something, of `span` neighbours: all of these, or every so many.

    def __init__(self, machines: Machines, size: int, span: int) -> None:
        self.size = size
        inside = machines.local_world_size
        self._crosses = size > 1 and span > inside and len(machines.hosts) > 1
        self._inside = min(host.inside_bytes_per_s for host in machines.hosts)
        self._network = machines.network
        # Rings that lie side by side share the line of a host.
        on_host = max(1.0, size * inside / span)
        self._sharing = max(1.0, inside / on_host)

    def ring(self, size_bytes: float, messages: float) -> _Sent:
        """A ring in which each rank sends so many bytes to the next."""
        if self.size == 1:
            return _Sent()
        if not self._crosses:
            return _Sent(size_bytes / self._inside, size_bytes)
        line = self._sharing * size_bytes
        seconds = max(size_bytes / self._inside, line / self._network.bytes_per_s)
        seconds += messages * self._network.latency_s * (self.size - 1)
        return _Sent(seconds, size_bytes, line)


def communication(
    config: RunConfig,
    strategy: Strategy,
    layout: Layout,
    machines: Machines,
    count: Count,
    micro_steps: int,
) -> Communication:
    """The communication of a step under a resolved strategy."""
    setting, holding = count.setting, count.holding
    cut = layout.tp * layout.pp
    params, trained = count.params / cut, count.trained / cut
    blocks = max(1.0, count.model.layers / layout.pp)
    narrow = setting.compute_width
    unit = layout.tp
    shards = _Group(machines, layout.dp_shard * layout.cp, layout.dp_shard * layout.cp * unit)
    span = layout.world_size // layout.pp
    copies = _Group(machines, layout.replicate, span)
    copy_s = 0.0

    def ring(group: _Group, numbers: float, width: float, times: int) -> _Sent:
        # So many gathers, or scatters; an all-reduce is two.
        own = numbers * width * times * (group.size - 1) / group.size
        return group.ring(own, blocks * times)

    match strategy:
        case DDPStrategyConfig():
            everyone = _Group(machines, layout.dp_size * layout.cp, span)
            width = setting.trained_width if strategy.gradient_compression == "none" else 2
            each, once = _Sent(), ring(everyone, trained, width, 2)
        case FSDPStrategyConfig():
            width = 4 if strategy.reduce_dtype == "fp32" else 2
            is_full = strategy.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
            own = ring(shards, params, narrow, 2 if is_full else 1)
            own += ring(shards, trained, width, 1)
            own += ring(copies, trained / shards.size, width, 2)
            each, once = (own, _Sent()) if is_full else (_Sent(), own)
            if strategy.cpu_offload:
                copy_s = (2 * params + trained) * setting.trained_width / shards.size / PCIE
        case DeepSpeedStrategyConfig():
            everyone = _Group(machines, layout.world_size, layout.world_size)
            stage = 3 if holding.weights > 1 else 2 if holding.gradients > 1 else 1
            reduced = ring(everyone, trained, narrow, 1)
            gathered = ring(everyone, params, narrow, 2 if stage == 3 else 1)
            each = (reduced if stage >= 2 else _Sent()) + (gathered if stage == 3 else _Sent())
            once = (reduced if stage == 1 else _Sent()) + (gathered if stage < 3 else _Sent())
            if holding.offloads_state:
                copy_s = 2 * trained * narrow / holding.state / PCIE / micro_steps
            if holding.offloads_weights:
                copy_s += 2 * params * narrow / holding.weights / PCIE
        case _:
            raise AssertionError("a strategy is chosen first")
    bare = _model_parallel(layout, machines, count)
    total = (each + bare).times(micro_steps) + once
    return Communication(
        each.seconds, bare.seconds, once.seconds, copy_s, total.rank_bytes, total.line_bytes
    )


def _model_parallel(layout: Layout, machines: Machines, count: Count) -> _Sent:
    # Of a micro-step, for activations: nothing hides it.
    model, setting = count.model, count.setting
    tokens, layers = setting.rows * setting.length, model.layers / layout.pp
    stream = tokens * model.hidden * setting.compute_width
    found = _Sent()
    if layout.tp > 1:
        times = 6 if setting.checkpointing == "full" else 4
        own = times * layers * 2 * stream * (layout.tp - 1) / layout.tp
        found += _Group(machines, layout.tp, layout.tp).ring(own, times * layers)
    if layout.cp > 1:
        keys = 2 * tokens * model.kv_heads * model.head_dim * setting.compute_width
        group = _Group(machines, layout.cp, layout.cp * layout.tp)
        found += group.ring(3 * layers * keys * (layout.cp - 1), 3 * layers)
    if layout.pp > 1:
        found += _Group(machines, 2, layout.world_size).ring(2 * stream, 2)
    return found

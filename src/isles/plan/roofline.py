"""Seconds of computing and communication, from the limits of GPUs and links.

A micro-batch takes the time of its matrix products, at a share of the GPU's table speed, plus the
time to move the rest of its data through the GPU's memory. It takes at least the time to launch its
kernels. The three constants are guesses, and `ASSUMPTIONS` prints them. Measurements of a run
replace them.
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
"""Share of a GPU's table speed that matrix products of a training step reach."""

PASSES = {False: 10.0, True: 5.0}
"""Passes through the GPU's memory of the data for the backward pass, reads and writes together. By
whether torch.compile is used, which fuses the operations between matrix products."""

_PASSES_AGAIN = {"none": 1.0, "selective": 1.2, "full": 1.3, "offload": 1.3}
"""Factor of these passes, by gradient_checkpointing."""

LAUNCHES = {False: 160, True: 50}
"""Kernels of a block, forward and backward, by whether torch.compile is used."""

LAUNCH_S = 5e-6
PCIE = 10e9
HOST_BANDWIDTH = 20e9
"""Bytes per second of main memory that the optimizer of an offloaded model reaches."""

ASSUMPTIONS = (
    f"matrix products reach {MATMUL_SHARE:.0%} of a GPU's table speed; data kept for the "
    f"backward pass moves {PASSES[False]:.0f} times through its memory (torch.compile: "
    f"{PASSES[True]:.0f}); a kernel takes {LAUNCH_S * 1e6:.0f} µs to launch",
    "communication of blocks overlaps the micro-batch, of gradients the last backward pass",
    f"GPUs without NVLink exchange {PCIE / 1e9:.0f} GB/s, GPUs with NVLink 80 % of its rate",
)

_STATE_BYTES = {"adamw": 16, "muon": 12, "sgd": 8, "adamw_8bit": 4}
"""Bytes of optimizer state that are read and written for each weight."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a micro-batch on one rank.

    Args:
        flops: FLOPs, with recomputation.
        traffic: bytes through the GPU's memory, without matrix products.
        launches: kernels.
        forward_share: share of the time outside the backward pass.
    """

    flops: float
    traffic: float
    launches: float
    forward_share: float = 1 / 3

    def seconds(self, device: Device, *, is_narrow: bool) -> float | None:
        """Seconds on a device. None: its speed is unknown."""
        flops = device.flops if is_narrow else device.fp32_flops
        if not flops or not device.bandwidth:
            return None
        computing = self.flops / (flops * MATMUL_SHARE) + self.traffic / device.bandwidth
        return max(computing, self.launches * LAUNCH_S if device.is_cuda else 0.0)


def work_of(count: Count, layout: Layout, *, is_compiled: bool) -> Work:
    """Work of a micro-batch on one rank."""
    model, setting, holding = count.model, count.setting, count.holding
    cut = layout.tp * layout.pp
    products, attention = forward_flops(count)
    backward = products * (2.0 if setting.is_whole else 1.0) + 2.0 * attention
    again = products + attention if setting.computes_again else 0.0
    kept = model.layers * count.block.saved_bytes
    passes = PASSES[is_compiled] * _PASSES_AGAIN[setting.checkpointing]
    weights = count.params * setting.compute_width * 3.0
    if setting.is_mixed and setting.is_whole and not holding.casts_whole:
        weights += count.params * 6.0  # autocast reads fp32 and writes 16 bits
    if setting.block_bits:
        # 4 bits become 16 for each product: read, write, read.
        visits = 3.0 if setting.computes_again else 2.0
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
    """Seconds of the optimizer's step and clipping, moving weights, gradients and state once."""
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
    """Data that one rank sends in a step, and its seconds.

    Args:
        micro_s: seconds per micro-step that overlap its computing as far as possible.
        bare_s: seconds per micro-step that overlap nothing.
        step_s: seconds per step that overlap the last backward pass.
        copy_s: seconds per micro-step between main memory and the GPU.
        sent_bytes: bytes that one rank sends in a step with all its micro-steps.
        line_bytes: bytes that leave the host over its network, of this rank and its neighbors.
    """

    micro_s: float
    bare_s: float
    step_s: float
    copy_s: float
    sent_bytes: float
    line_bytes: float

    def exposed_s(self, micro_steps: int, micro_step_s: float, backward_share: float) -> float:
        """Seconds of a step's communication that do not overlap computing."""
        hidden = max(0.0, self.micro_s - micro_step_s) * micro_steps
        last = max(0.0, self.step_s - micro_step_s * backward_share)
        return hidden + last + (self.bare_s + self.copy_s) * micro_steps


@dataclass(frozen=True, slots=True)
class _Sent:
    # Seconds of a collective, and its bytes from a rank and over the network of a host.
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
    # Ranks that exchange data among `span` neighbors: all of them, or evenly spaced ones.

    def __init__(self, machines: Machines, size: int, span: int) -> None:
        self.size = size
        inside = machines.local_world_size
        self._crosses = size > 1 and span > inside and len(machines.hosts) > 1
        self._inside = min(host.inside_bytes_per_s for host in machines.hosts)
        self._network = machines.network
        # Parallel rings share the network of a host.
        on_host = max(1.0, size * inside / span)
        self._sharing = max(1.0, inside / on_host)

    def ring(self, size_bytes: float, messages: float) -> _Sent:
        """A ring: each rank sends `size_bytes` to the next rank."""
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
    if setting.checkpointing == "offload":
        # The input of each block, to main memory and back.
        copy_s += 2 * blocks * count.hidden.size_bytes / PCIE

    def ring(group: _Group, numbers: float, width: float, times: int) -> _Sent:
        # Number of gathers or scatters. An all-reduce counts as two.
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
                copy_s += (2 * params + trained) * setting.trained_width / shards.size / PCIE
        case DeepSpeedStrategyConfig():
            everyone = _Group(machines, layout.world_size, layout.world_size)
            stage = 3 if holding.weights > 1 else 2 if holding.gradients > 1 else 1
            reduced = ring(everyone, trained, narrow, 1)
            gathered = ring(everyone, params, narrow, 2 if stage == 3 else 1)
            each = (reduced if stage >= 2 else _Sent()) + (gathered if stage == 3 else _Sent())
            once = (reduced if stage == 1 else _Sent()) + (gathered if stage < 3 else _Sent())
            if holding.offloads_state:
                copy_s += 2 * trained * narrow / holding.state / PCIE / micro_steps
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
    # Activations of a micro-step overlap nothing.
    model, setting = count.model, count.setting
    tokens, layers = setting.rows * setting.length, model.layers / layout.pp
    stream = tokens * model.hidden * setting.compute_width
    found = _Sent()
    if layout.tp > 1:
        times = 6 if setting.computes_again else 4
        own = times * layers * 2 * stream * (layout.tp - 1) / layout.tp
        found += _Group(machines, layout.tp, layout.tp).ring(own, times * layers)
    if layout.cp > 1:
        keys = 2 * tokens * model.kv_heads * model.head_dim * setting.compute_width
        group = _Group(machines, layout.cp, layout.cp * layout.tp)
        found += group.ring(3 * layers * keys * (layout.cp - 1), 3 * layers)
    if layout.pp > 1:
        found += _Group(machines, 2, layout.world_size).ring(2 * stream, 2)
    return found

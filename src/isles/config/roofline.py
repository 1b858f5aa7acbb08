"""Seconds of computing and communication of a step, from the limits of GPUs and links.

`strategy: auto` compares strategies by these seconds, and `isles plan` prints them. A micro-batch
takes the time of its matrix products and its attention, plus the time to move all data through the
GPU's memory. It takes at least the time to launch its kernels. `benchmarks/plan_published.py`
compares the seconds with published speeds. `ASSUMPTIONS` lists the constants for `isles plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isles.config.layout import Layout, Strategy
from isles.config.memory import has_whole_stages, holding_of, setting_of
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.facts.gpus import Gpu, Products
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.forward import FP32
from isles.facts.memory.setting import BUCKET_NUMBERS, chunk_tokens
from isles.facts.memory.step import Count

PRODUCT_SHARE = 0.7
"""Share of a GPU's table speed that large matrix products reach. Smaller products take the time of
their operands in addition."""

ATTENTION_SHARE = 0.45
"""Share of a GPU's table speed that fused attention reaches."""

BANDWIDTH_SHARE = 0.7
"""Share of a GPU's table bandwidth that kernels reach."""

PASSES = {False: 10.0, True: 2.75}
"""Passes through the GPU's memory of the data that a block keeps for the backward pass, reads and
writes together, without operands of products and attention. By whether torch.compile is used, which
fuses these operations. Counted for Llama blocks in bf16: 8.9 to 10.4 by single operations (see
`tests/unit/test_roofline.py`), and 2.7 to 2.8 by the buffers of Inductor's kernels."""

LOGIT_BYTES = {False: 14.0, True: 6.0}
"""Bytes that the loss moves for each logit, without operands of products."""

LAUNCHES = {False: 110, True: 50}
"""Kernels of a block, forward and backward, by whether torch.compile is used."""

LAUNCH_S = 6e-6
PCIE = 10e9
"""Bytes per second between GPUs of a machine without NVLink: PCIe 4.0 through main memory."""

NVLINK_SHARE = 0.8
"""Share of NVLink's rate that an all-reduce reaches."""

HOST_BANDWIDTH = 20e9
"""Bytes per second of main memory that the optimizer of an offloaded model reaches."""

ASSUMPTIONS = (
    f"matrix products reach {PRODUCT_SHARE:.0%} of a GPU's table speed, attention "
    f"{ATTENTION_SHARE:.0%}, and kernels {BANDWIDTH_SHARE:.0%} of its memory's bandwidth",
    f"data kept for the backward pass moves {PASSES[False]:g} times through its memory "
    f"(torch.compile: {PASSES[True]:g}); a kernel takes {LAUNCH_S * 1e6:.0f} µs to launch",
    "communication of blocks overlaps the micro-batch, of gradients the last backward pass",
    f"GPUs without NVLink exchange {PCIE / 1e9:.0f} GB/s, GPUs with NVLink {NVLINK_SHARE:.0%} of "
    "its rate",
)

_STATE_BYTES = {"adamw": 16, "muon": 12, "sgd": 8, "adamw_8bit": 4}
"""Bytes of optimizer state that are read and written for each weight."""

_WEIGHT_BYTES = 16.0
"""Bytes per weight and micro-batch: a 16-bit copy is made (6), and its gradient added in fp32."""

_NEWTON_SCHULZ = 30.0
"""FLOPs of Muon for each weight of a square matrix, times its side: five iterations."""

_FP8_SPEED = 2.0
"""Speed of fp8 products over bf16 products, on every GPU of the table that has fp8."""

_FP8_OPERANDS = 2.0
"""Bytes that fp8 products of blocks move, over bf16 products. Bytes per number of an input, a
weight or the gradient of an output: two of three products read it in 8 bits, and the third writes
it in 16 (4; in bf16: 6). Its largest number is found in one reading, and it is read and written for
each of its two layouts (8)."""

_AGAIN = 1.4
"""Data that a block moves with checkpointing, which repeats the forward pass, over data without."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Speed of a rank's device. An unknown speed is 0.

    Args:
        flops: FLOP/s of matrix products in the run's precision.
        bandwidth: bytes per second of its memory.
    """

    flops: float = 0.0
    bandwidth: float = 0.0
    is_cuda: bool = True

    @classmethod
    def of(cls, gpu: Gpu | None, products: Products) -> Chip:
        """A GPU of the table."""
        if gpu is None:
            return cls()
        return cls(gpu.flops(products), gpu.bandwidth_bytes_per_s)


UNKNOWN_CHIP = Chip()


@dataclass(frozen=True, slots=True)
class Links:
    """Links between the ranks of a cluster.

    Args:
        local_world_size: ranks per host. For unequal hosts, the greatest common divisor.
        inside_bytes_per_s: between ranks of a host, in one direction.
        network_bytes_per_s, latency_s: between hosts. The latency is per message.
    """

    local_world_size: int
    hosts: int
    inside_bytes_per_s: float
    network_bytes_per_s: float
    latency_s: float = 0.0


def slowest(chips: Sequence[Chip]) -> Chip:
    """The least speeds of several devices. 0 if the speed of a device is unknown."""
    return Chip(
        min(chip.flops for chip in chips),
        min(chip.bandwidth for chip in chips),
        all(chip.is_cuda for chip in chips),
    )


def count_of(
    model: Architecture,
    config: RunConfig,
    strategy: Strategy,
    layout: Layout,
    rows: int,
    micro_batches: int,
    gpu_bytes: int,
) -> Count:
    """Counts of a micro-batch of `rows` samples under a resolved strategy."""
    setting = setting_of(
        config, layout, rows=rows, micro_batches=micro_batches, gpu_bytes=gpu_bytes
    )
    return Count(model, setting, holding_of(config, strategy, layout, model, micro_batches))


def inside_rate(gpu: Gpu | None) -> float:
    """Bytes per second between GPUs of this kind in one machine, in one direction."""
    return (gpu.nvlink_bytes_per_s if gpu else 0.0) * NVLINK_SHARE or PCIE


def _ends_cut(count: Count) -> int:
    # Ranks that share embedding and head.
    return count.holding.tensor if count.holding.cuts_ends else 1


def _on_rank(blocks: float, ends: float, count: Count, layout: Layout) -> float:
    # Numbers of a rank before data-parallel sharding. Those of blocks are of one rank already,
    # except for a pipeline.
    return (blocks + ends / _ends_cut(count)) / layout.pp


def forward_flops(count: Count) -> tuple[float, float]:
    """FLOPs of a micro-batch's forward pass on one rank of tensor parallel: of matrix products with
    weights, and of attention."""
    model, setting = count.model, count.setting
    products = model.layers * float(count.block.products)
    products += 2.0 * setting.rows * setting.length * model.head_params / _ends_cut(count)
    return products, model.layers * float(count.block.attention_flops)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a micro-batch on one rank.

    Args:
        products: FLOPs of matrix products with weights, with recomputation.
        attention: FLOPs of attention, with recomputation.
        traffic: bytes through the GPU's memory.
        launches: kernels.
        copied: bytes between the GPU and main memory, which overlap computing.
        forward_share: share of the time outside the backward pass.
        in_fp8: part of `products` in fp8.
    """

    products: float
    attention: float
    traffic: float
    launches: float
    copied: float = 0.0
    forward_share: float = 1 / 3
    in_fp8: float = 0.0

    def seconds(self, chip: Chip) -> float | None:
        """Seconds on a device. None: its speed is unknown."""
        if not chip.flops or not chip.bandwidth:
            return None
        products = self.products - self.in_fp8 * (1 - 1 / _FP8_SPEED)
        computing = products / (chip.flops * PRODUCT_SHARE)
        computing += self.attention / (chip.flops * ATTENTION_SHARE)
        computing += self.traffic / (chip.bandwidth * BANDWIDTH_SHARE)
        if not chip.is_cuda:
            return computing
        return max(computing, self.launches * LAUNCH_S, self.copied / PCIE)


def work_of(count: Count, layout: Layout, *, is_compiled: bool) -> Work:
    """Work of a micro-batch on one rank."""
    model, setting, block = count.model, count.setting, count.block
    products, attention = forward_flops(count)
    tokens, vocab = setting.rows * setting.length, model.vocab / _ends_cut(count)
    head = (tokens * (model.hidden + vocab) + model.hidden * vocab) * setting.compute_width
    is_fp8 = setting.precision == "fp8-mixed"
    in_blocks = model.layers * block.operand_bytes * (_FP8_OPERANDS if is_fp8 else 1.0)
    # Frozen weights get no gradients. Attention computes its scores again for the backward pass.
    visits = 3.0 if setting.is_whole else 2.0
    again = {"none": 0.0, "selective": model.layers * float(block.repeated_products)}.get(
        setting.checkpointing, model.layers * float(block.products)
    )
    repeats_blocks = setting.computes_again
    all_attention = attention * (4.5 if repeats_blocks else 3.5)
    passes = PASSES[is_compiled] * (1.0 if setting.checkpointing == "none" else _AGAIN)
    traffic = model.layers * block.saved_bytes * passes
    traffic += (in_blocks + head) * visits + in_blocks * again / products
    traffic += _loss_bytes(count, tokens, vocab, is_compiled=is_compiled)
    if setting.is_mixed and setting.is_whole:
        ends = count.params - model.layers * block.params
        traffic += (model.layers * block.params + ends / _ends_cut(count)) * _WEIGHT_BYTES
    if setting.block_bits:
        # 4 bits become 16 for each product.
        widened = (block.params - block.stacked_params) * (setting.block_bits / 8 + 2)
        traffic += (visits + repeats_blocks) * model.layers * widened
    is_offloaded = setting.checkpointing == "offload"
    launches = LAUNCHES[is_compiled] * model.layers / layout.pp
    if setting.checkpointing != "none":
        launches *= _AGAIN
    forward = products + attention
    block_products = model.layers * float(block.products) * visits + again
    return Work(
        (products * visits + again) / layout.pp,
        all_attention / layout.pp,
        traffic / layout.pp,
        launches,
        2.0 * count.hidden.size_bytes * model.layers / layout.pp * is_offloaded,
        forward / (products * visits + again + all_attention),
        block_products / layout.pp if is_fp8 else 0.0,
    )


def _loss_bytes(count: Count, tokens: int, vocab: float, *, is_compiled: bool) -> float:
    # Whole logits in fp32 are also log-probabilities, and have a gradient in fp32.
    # Ranks that share the head gather them.
    setting, model = count.setting, count.model
    if not (setting.is_chunked and model.has_plain_head):
        return tokens * model.vocab * LOGIT_BYTES[is_compiled] * 2
    found = tokens * vocab * LOGIT_BYTES[is_compiled]
    if setting.is_whole or setting.trains_ends:
        # Each chunk adds to the gradient of the whole head, or of the rank's part, in fp32.
        chunks = max(1.0, tokens / chunk_tokens(int(vocab), setting.gpu_bytes))
        found += chunks * model.head_params / _ends_cut(count) * 2 * FP32
    return found


def optimizer_seconds(count: Count, chip: Chip, layout: Layout) -> float:
    """Seconds of the optimizer's step and clipping, moving weights, gradients and state once."""
    setting, holding = count.setting, count.holding
    numbers = _on_rank(count.trained_blocks, count.trained_ends, count, layout) / holding.state
    per_number = _STATE_BYTES[setting.optimizer] + 4 * setting.trained_width
    if setting.optimizer == "adamw" and setting.trained_width == 2:
        per_number -= 8
    if holding.offloads_state:
        ranks = 1 if not chip.is_cuda else max(1, layout.world_size // holding.state)
        return numbers * per_number * ranks / HOST_BANDWIDTH
    seconds = numbers * per_number / (chip.bandwidth * BANDWIDTH_SHARE or HOST_BANDWIDTH)
    if setting.optimizer == "muon" and chip.flops:
        # Ranks divide the matrices among each other.
        flops = _NEWTON_SCHULZ * count.trained_blocks * count.model.hidden / layout.world_size
        seconds += flops / (chip.flops * PRODUCT_SHARE)
    return seconds


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
        after_s: seconds per step after the last backward pass, which overlap nothing.
    """

    micro_s: float
    bare_s: float
    step_s: float
    copy_s: float
    sent_bytes: float
    line_bytes: float
    after_s: float = 0.0

    def exposed_s(self, micro_steps: int, micro_step_s: float, backward_share: float) -> float:
        """Seconds of a step's communication that do not overlap computing."""
        hidden = max(0.0, self.micro_s - micro_step_s) * micro_steps
        last = max(0.0, self.step_s - micro_step_s * backward_share)
        return hidden + last + self.after_s + (self.bare_s + self.copy_s) * micro_steps


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

    def __init__(self, links: Links, size: int, span: int) -> None:
        self.size = size
        inside = links.local_world_size
        self._crosses = size > 1 and span > inside and links.hosts > 1
        self._links = links
        # Parallel rings share the network of a host.
        on_host = max(1.0, size * inside / span)
        self._sharing = max(1.0, inside / on_host)

    def ring(self, size_bytes: float, messages: float) -> _Sent:
        """A ring: each rank sends `size_bytes` to the next rank."""
        if self.size == 1:
            return _Sent()
        if not self._crosses:
            return _Sent(size_bytes / self._links.inside_bytes_per_s, size_bytes)
        line = self._sharing * size_bytes
        seconds = max(
            size_bytes / self._links.inside_bytes_per_s, line / self._links.network_bytes_per_s
        )
        seconds += messages * self._links.latency_s * (self.size - 1)
        return _Sent(seconds, size_bytes, line)


def communication(
    config: RunConfig,
    strategy: Strategy,
    layout: Layout,
    links: Links,
    count: Count,
    micro_steps: int,
) -> Communication:
    """The communication of a step under a resolved strategy."""
    setting, holding = count.setting, count.holding
    in_blocks = float(count.model.layers * count.block.params)
    params = _on_rank(in_blocks, count.params - in_blocks, count, layout)
    trained = _on_rank(count.trained_blocks, count.trained_ends, count, layout)
    blocks = max(1.0, count.model.layers / layout.pp)
    narrow = setting.compute_width
    gathered = _on_rank(
        count.model.layers * count.block.frozen_bytes(setting.block_bits),
        (count.params - in_blocks) * narrow,
        count,
        layout,
    )
    unit = layout.tp
    shards = _Group(links, layout.dp_shard * layout.cp, layout.dp_shard * layout.cp * unit)
    span = layout.world_size // layout.pp
    copies = _Group(links, layout.replicate, span)
    copy_s, after = 0.0, _tied_head(layout, links, count)

    def ring(group: _Group, numbers: float, width: float, times: int) -> _Sent:
        # Number of gathers or scatters. An all-reduce counts as two.
        own = numbers * width * times * (group.size - 1) / group.size
        return group.ring(own, blocks * times)

    match strategy:
        case DDPStrategyConfig():
            everyone = _Group(links, layout.dp_size * layout.cp, span)
            width = setting.trained_width if strategy.gradient_compression == "none" else 2
            each, once = _Sent(), ring(everyone, trained, width, 2)
            if has_whole_stages(strategy):
                once, after = _Sent(), after + _all_reduce(everyone, trained, setting.trained_width)
        case FSDPStrategyConfig():
            width = 4 if strategy.reduce_dtype == "fp32" else 2
            is_full = strategy.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
            own = ring(shards, gathered, 1, 2 if is_full else 1)
            own += ring(shards, trained, width, 1)
            # Replicas reduce gradients once per step, whatever their shards do.
            once = ring(copies, trained / shards.size, width, 2)
            each, once = (own, once) if is_full else (_Sent(), own + once)
            if strategy.cpu_offload:
                held = gathered if setting.block_bits else params * setting.trained_width
                copy_s = (2 * held + trained * setting.trained_width) / shards.size / PCIE
        case DeepSpeedStrategyConfig():
            everyone = _Group(links, layout.world_size, layout.world_size)
            stage = 3 if holding.weights > 1 else 2 if holding.gradients > 1 else 1
            reduced = ring(everyone, trained, narrow, 1)
            weights = ring(everyone, params, narrow, 2 if stage == 3 else 1)
            each = (reduced if stage >= 2 else _Sent()) + (weights if stage == 3 else _Sent())
            once = (reduced if stage == 1 else _Sent()) + (weights if stage < 3 else _Sent())
            if holding.offloads_state:
                copy_s = 2 * trained * narrow / holding.state / PCIE / micro_steps
            if holding.offloads_weights:
                copy_s += 2 * params * narrow / holding.weights / PCIE
        case _:
            raise AssertionError("a strategy is chosen first")
    bare = _model_parallel(layout, links, count)
    total = (each + bare).times(micro_steps) + once + after
    return Communication(
        each.seconds,
        bare.seconds,
        once.seconds,
        copy_s,
        total.rank_bytes,
        total.line_bytes,
        after.seconds,
    )


def _all_reduce(group: _Group, numbers: float, width: int) -> _Sent:
    # Gradients of a whole stage, in buckets, after the backward pass.
    own = 2 * numbers * width * (group.size - 1) / group.size
    return group.ring(own, 2 * max(1.0, numbers / BUCKET_NUMBERS))


def _tied_head(layout: Layout, links: Links, count: Count) -> _Sent:
    # The last stage sends the gradient of a tied head to the first, which sends the new weight.
    holding = count.holding
    if layout.pp == 1 or holding.returns or not count.saved_twice:
        return _Sent()
    numbers = count.model.head_params / _ends_cut(count) / holding.weights
    one = _Group(links, 2, layout.world_size).ring(
        numbers * count.setting.trained_width, max(1.0, numbers / BUCKET_NUMBERS)
    )
    return replace(one, seconds=2 * one.seconds)


def _model_parallel(layout: Layout, links: Links, count: Count) -> _Sent:
    # Activations of a micro-step overlap nothing.
    model, setting = count.model, count.setting
    tokens, layers = setting.rows * setting.length, model.layers / layout.pp
    stream = tokens * model.hidden * setting.compute_width
    found = _Sent()
    if layout.tp > 1:
        times = 6 if setting.computes_again else 4
        own = times * layers * 2 * stream * (layout.tp - 1) / layout.tp
        found += _Group(links, layout.tp, layout.tp).ring(own, times * layers)
    if layout.cp > 1:
        keys = 2 * tokens * model.kv_heads * model.head_dim * setting.compute_width
        group = _Group(links, layout.cp, layout.cp * layout.tp)
        found += group.ring(3 * layers * keys * (layout.cp - 1), 3 * layers)
    if layout.pp > 1:
        found += _Group(links, 2, layout.world_size).ring(2 * stream, 2)
    return found

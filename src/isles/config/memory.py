"""Memory of a rank under a run file and a strategy. See `isles.facts.memory`."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

from isles.config.files import find_shape
from isles.config.interop.deepspeed import deepspeed_settings, stage_of
from isles.config.layout import Layout, Strategy, make_layout
from isles.config.sections.data import isolates_any
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    AutoStrategy,
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
    MeshSection,
    PipelineSchedule,
)
from isles.errors import UserError
from isles.facts.memory.architecture import Architecture, UnknownShapeError
from isles.facts.memory.count import Count
from isles.facts.memory.forward import FP32
from isles.facts.memory.result import StepMemory
from isles.facts.memory.setting import BUCKET_NUMBERS, Holding, MemorySettings, state_bytes
from isles.facts.memory.step import memory_of

_NF4_BITS = 4.5
"""Bits of a 4-bit number, with an fp32 constant for every 64 numbers."""

_NF4_DOUBLE_BITS = 4.127
"""The same with 8-bit constants, and an fp32 constant for every 256 of these constants.

Source: Dettmers et al. 2023 (arXiv:2305.14314), section 3.
"""


CPU_MICRO_BATCH_SIZE = 8
"""Micro-batch size on a CPU, where large micro-batches do not help: this, or the largest divisor
of the rank's rows below it."""


def architecture_of(config: RunConfig, huggingface_cache: Path) -> Architecture | None:
    """The run's model by its config.json, or None if the file is not on this machine.

    Raises:
        UserError: the config.json lacks a size of the model.
    """
    shape = find_shape(config.model, huggingface_cache)
    return None if shape is None else architecture(config, shape)


def architecture(config: RunConfig, shape: dict[str, Any]) -> Architecture:
    """The run's model by its Hugging Face config; see `architecture_of`."""
    try:
        return Architecture.of(shape, vocab_size=config.tokenizer.train_vocab_size)
    except UnknownShapeError as error:
        raise UserError(
            f"the model's config.json lacks {error}",
            where="model.name_or_path",
            fix="use the config.json of a causal language model of transformers",
            id="model.config",
        ) from error


def setting_of(
    config: RunConfig, layout: Layout, *, rows: int, micro_batches: int, gpu_bytes: int = 0
) -> MemorySettings:
    """The inputs of a step's memory.

    Args:
        rows: samples of a micro-batch, or pairs of preferences.
        micro_batches: micro-batches of a rank in a step.
        gpu_bytes: memory of the GPU; 0 on a CPU.
    """
    training, adapter = config.training, config.adapter
    per_sample = 2 if training.method == "dpo" else 1
    method = config.strategy.cp_method if isinstance(config.strategy, MeshSection) else ""
    length = config.data.seq_length
    named = adapter.target_modules
    named = (named,) if isinstance(named, str) else named
    ends = frozenset(name.rpartition(".")[2] for name in named)
    block_bits = 0.0
    if adapter.type == "qlora":
        block_bits = _NF4_DOUBLE_BITS if adapter.bnb_4bit_use_double_quant else _NF4_BITS
    return MemorySettings(
        precision=training.precision,
        optimizer=training.optimizer,
        rows=rows * per_sample,
        length=-(-length // layout.cp),
        seen=length,
        gathers_keys=layout.cp > 1 and method == "allgather",
        swaps_heads=layout.cp > 1 and method == "ulysses",
        checkpointing=training.gradient_checkpointing,
        accumulates=micro_batches > 1,
        adapter_rank=0 if adapter.type == "none" else adapter.r,
        adapter_targets=None if "all-linear" in ends else ends,
        adapter_experts=ends & {"gate_up_proj", "down_proj"},
        block_bits=block_bits,
        has_dropout=adapter.dropout > 0,
        is_packed=isolates_any(config.data),
        trains_ends=bool(adapter.modules_to_save),
        gpu_bytes=gpu_bytes,
    )


def holding_of(
    config: RunConfig,
    strategy: Strategy,
    layout: Layout,
    model: Architecture,
    micro_batches: int,
    offloaded: int = 0,
) -> Holding:
    """How a rank holds the model under a resolved strategy.

    Args:
        offloaded: with `cpu_offload: auto`, what the rank keeps in main memory; see
            `offloaded_blocks`.
    """
    shards = layout.dp_shard * layout.cp
    grid: dict[str, Any] = {
        "tensor": layout.tp,
        "cuts_ends": model.vocab % layout.tp == 0,
    }
    if layout.pp > 1 and isinstance(strategy, MeshSection):
        grid |= {"cut": layout.cut, **_pipeline(strategy.pp_schedule, layout.pp, micro_batches)}
        grid |= _buckets_of_stages(config, strategy, layout, model)
    match strategy:
        case AutoStrategy():
            raise AssertionError("a strategy is chosen first")
        case DDPStrategyConfig() if layout.tp == layout.pp == 1:
            has_copies = config.training.precision in ("bf16-mixed", "fp8-mixed")
            return Holding(
                gathers="copies" if has_copies else "nothing",
                casts_whole=has_copies,
                keeps_gradients=layout.world_size > 1,
                savers=layout.world_size,
            )
        case DDPStrategyConfig() if has_whole_stages(strategy):
            has_copies = config.training.precision == "bf16-mixed"
            gathered: Literal["copies", "nothing"] = "copies" if has_copies else "nothing"
            savers = layout.world_size // layout.pp
            return Holding(gathers=gathered, casts_whole=has_copies, savers=savers, **grid)
        case DDPStrategyConfig():
            # FSDP2 with shards of one rank.
            return Holding(gathers="all", casts_whole=True, gradient_width=4, **grid)
        case FSDPStrategyConfig():
            share = float(strategy.cpu_offload is True)
            if strategy.cpu_offload == "auto":
                share = offloaded / model.layers
            reduces_each = strategy.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
            gathers: Literal["blocks", "backward", "all"] = "blocks" if reduces_each else "all"
            if layout.pp > 1:
                # Gradients travel after the last micro-batch, and weights stay once gathered.
                one_each = strategy.pp_schedule in ("1f1b", "gpipe")
                gathers = "backward" if reduces_each and one_each else "all"
            return Holding(
                weights=shards,
                gradients=shards if gathers == "blocks" else 1,
                gradient_width=0
                if gathers == "blocks"
                else 4 - 2 * (strategy.reduce_dtype != "fp32"),
                state=shards,
                gathers=gathers,
                casts_whole=True,
                offloaded_weights=share,
                offloaded_state=share,
                **grid,
            )
        case DeepSpeedStrategyConfig():
            return _deepspeed_holding(config, strategy, layout)
        case _:
            assert_never(strategy)


def _deepspeed_holding(
    config: RunConfig, strategy: DeepSpeedStrategyConfig, layout: Layout
) -> Holding:
    settings = deepspeed_settings(config, strategy)
    zero, stage, ranks = settings["zero_optimization"], stage_of(settings), layout.dp_size
    is_mixed = config.training.precision != "32-true"
    return Holding(
        weights=ranks if stage == 3 else 1,
        gradients=ranks if stage >= 2 else 1,
        state=ranks,
        gathers="modules" if stage == 3 else "nothing",
        casts_whole=True,
        second_copy=True,
        # Stage 1 keeps the 16-bit gradients in addition to the fp32 ones.
        gradient_width=6 if is_mixed and stage == 1 else 4,
        bucket=int(zero["reduce_bucket_size"]),
        bucket_widths=_BUCKETS[stage, is_mixed],
        offloaded_weights=float("offload_param" in zero),
        offloaded_state=float("offload_optimizer" in zero),
    )


def has_whole_stages(strategy: Strategy | MeshSection) -> bool:
    """True if each rank of a pipeline stage holds the stage whole, without FSDP2.

    The schedule zbv computes the gradients of weights later than the gradients of hidden states.
    It finds the weights by their tensors, which 16-bit copies replace.
    """
    if not isinstance(strategy, DDPStrategyConfig) or strategy.pp_size == 1:
        return False
    return strategy.tp_size == 1 and strategy.pp_schedule != "zbv"


def _pipeline(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> dict[str, Any]:
    # Activations that each schedule of torch keeps: see `torch.distributed.pipelining.schedules`.
    stages, behind = 1, range(ranks - 1, -1, -1)
    match schedule:
        case "gpipe":
            in_flight = [micro_batches] * ranks
        case "1f1b" if micro_batches < ranks:
            in_flight = [micro_batches] * ranks
        case "1f1b":
            in_flight = [1 + later for later in behind]
        case "interleaved-1f1b":
            stages, rounds = 2, max(1, micro_batches // ranks)
            in_flight = [micro_batches // rounds + 1 + 2 * later for later in behind]
        case "zbv":
            # Each rank has this many in flight, and one more that waits for its weight gradients.
            stages, in_flight = 2, [2 * ranks + 1] * ranks
        case _:
            assert_never(schedule)
    most = stages * micro_batches
    return {
        "pipeline": ranks,
        "stages": stages,
        "returns": schedule == "zbv",
        "in_flight": tuple(min(own, most) for own in in_flight),
        "micro_batches": micro_batches,
    }


def _buckets_of_stages(
    config: RunConfig, strategy: MeshSection, layout: Layout, model: Architecture
) -> dict[str, Any]:
    # Buffers of gradients after the backward pass: for a tied head (pipeline/tied.py), and between
    # the ranks of a whole stage (pipeline/whole.py).
    trains_ends = config.adapter.type == "none" or bool(config.adapter.modules_to_save)
    sends_head = model.is_tied and trains_ends and strategy.pp_schedule != "zbv"
    if not sends_head and not (has_whole_stages(strategy) and layout.dp_size * layout.cp > 1):
        return {}
    width = 2 if config.training.precision == "bf16-true" else FP32
    return {"bucket": BUCKET_NUMBERS, "bucket_widths": (0, 0, width)}


_BUCKETS = {
    (1, True): (0, 0, 4),
    (1, False): (8, 8, 8),
    (2, True): (0, 4, 10),
    (2, False): (0, 8, 12),
    (3, True): (4, 4, 8),
    (3, False): (4, 8, 8),
}
"""Bytes per number in DeepSpeed's buckets, by stage and whether it computes in 16 bits. See
`Holding.bucket_widths`. Counted with DeepSpeed 0.19: it fills one bucket while it sends another,
and widens 16-bit numbers to send them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a run writes to disk and sends.

    Args:
        trained: numbers that have gradients.
        one: one checkpoint, with trained weights and optimizer state.
        checkpoints: all kept checkpoints, and the next one while isles writes it.
        export: the model or adapter at the end, or 0 without an export.
        gradients: gradients of all trained weights.
    """

    trained: int
    one: int
    checkpoints: int
    export: int
    gradients: int

    @property
    def kept(self) -> int:
        """Largest disk use of the run."""
        return self.checkpoints + self.export


def checkpoint_sizes(model: Architecture, config: RunConfig) -> Sizes:
    """Sizes of a run's checkpoints, export and gradients."""
    setting = setting_of(config, Layout(1, 1, 1, 1, 1), rows=1, micro_batches=1)
    count, width = Count(model, setting, Holding()), setting.trained_width
    weights, short = count.trained * width, model.layers * count.block.short_params
    state = state_bytes(
        count.trained_blocks, count.trained_ends, width, setting.optimizer, short=short
    )
    one = weights + count.saved_twice * width + state
    saves, export = config.checkpoint, weights
    if saves.merge_adapter and config.adapter.type != "none":
        export = model.params * 2
    return Sizes(
        trained=count.trained,
        one=int(one),
        checkpoints=int(one) * (saves.keep + 1),
        export=export if saves.export_on_finish else 0,
        gradients=weights,
    )


def step_memory(
    model: Architecture,
    config: RunConfig,
    strategy: Strategy,
    layout: Layout,
    *,
    rows: int,
    micro_batches: int = 2,
    gpu_bytes: int = 0,
    pp_rank: int | None = None,
    offloaded: int = 0,
) -> StepMemory:
    """The memory of a rank in a step, for plan, check and the start of a run.

    Args:
        strategy: a resolved strategy.
        rows: samples of a micro-batch.
        micro_batches: of a rank in a step.
        pp_rank: the rank of a pipeline. None: its fullest rank.
        offloaded: see `offloaded_blocks`.
    """
    setting = setting_of(
        config, layout, rows=rows, micro_batches=micro_batches, gpu_bytes=gpu_bytes
    )
    holding = holding_of(config, strategy, layout, model, micro_batches, offloaded)
    return memory_of(model, setting, holding, pp_rank)


def offloaded_blocks(
    model: Architecture,
    config: RunConfig,
    strategy: Strategy,
    layout: Layout,
    *,
    limit: float,
    rows: int | None = None,
    gpu_bytes: int = 0,
) -> int:
    """The blocks that a rank must keep in main memory under `cpu_offload: auto`, so that a
    micro-batch fits. If this is all blocks, embedding and head are in main memory too. 0 under
    another strategy.

    Larger micro-batches leave room for fewer blocks, but a step has fewer of them, and each copies
    the blocks once more. If the run file does not set their size, a step copies as little as
    possible.

    Args:
        limit: bytes that a step may use on the rank.
        rows: samples of a micro-batch. None: isles chooses.
    """
    if not (isinstance(strategy, FSDPStrategyConfig) and strategy.cpu_offload == "auto"):
        return 0
    of_rank = -(-config.training.global_batch_size // layout.dp_size)
    sizes = [min(rows, of_rank)] if rows else [2**i for i in range(of_rank.bit_length())]

    def blocks(size: int) -> int:
        def fits(offloaded: int) -> bool:
            memory = step_memory(
                model,
                config,
                strategy,
                layout,
                rows=size,
                gpu_bytes=gpu_bytes,
                offloaded=offloaded,
            )
            return memory.peak.total <= limit

        return bisect_left(range(model.layers + 1), True, key=fits)

    found = {size: blocks(size) for size in sizes}
    fitting = [size for size in sizes if found[size] <= model.layers]
    if not fitting:
        return model.layers
    return found[min(fitting, key=lambda size: -(-of_rank // size) * found[size])]


def main_memory(
    model: Architecture,
    config: RunConfig,
    *,
    world_size: int,
    local_world_size: int,
    is_cuda: bool,
) -> float:
    """Bytes of the model in main memory, for one rank: its weights on a CPU, and what the strategy
    offloads from a GPU. `strategy: auto` counts as fsdp, which needs the least.

    Raises:
        UserError: the strategy does not fit the number of ranks.
    """
    strategy = config.strategy
    if isinstance(strategy, AutoStrategy):
        strategy = FSDPStrategyConfig()
    layout = make_layout(strategy, world_size, local_world_size=local_world_size)
    needed = step_memory(model, config, strategy, layout, rows=1)
    # GPUs read weights from the files piece by piece, except that DeepSpeed takes them from a CPU.
    has_weights = not is_cuda or isinstance(strategy, DeepSpeedStrategyConfig)
    return needed.host + has_weights * needed.peak.weights

"""`strategy: {kind: auto}`: the strategy with the least communication that fits."""

from __future__ import annotations

from dataclasses import dataclass

from isles.config.layout import make_layout
from isles.config.memory import step_memory
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.setting import usable_bytes
from isles.facts.units import format_bytes

SLOW_LINK = 10e9
"""Bytes per second. Below this, gathering parameters takes longer than the computation with
them."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of the machines of a run.

    `memory_bytes` is the memory of the rank with the least. The link, between all ranks, is None if
    the choice does not need it.
    """

    world_size: int
    local_world_size: int
    memory_bytes: int
    link_bytes_per_s: float | None
    has_gpus: bool = False

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.memory_bytes)


def describe(strategy: DDPStrategyConfig | FSDPStrategyConfig) -> str:
    """Short name of a strategy."""
    if isinstance(strategy, DDPStrategyConfig):
        return "ddp"
    return f"fsdp {strategy.sharding_strategy}"


def needed_bytes(
    model: Architecture,
    config: RunConfig,
    strategy: DDPStrategyConfig | FSDPStrategyConfig,
    machine: Resources,
) -> int:
    """Memory of a rank under a strategy, with micro-batches of one sequence."""
    layout = make_layout(strategy, machine.world_size, local_world_size=machine.local_world_size)
    steps = -(-config.training.global_batch_size // layout.dp_size)
    memory = step_memory(
        model,
        config,
        strategy,
        layout,
        rows=1,
        micro_batches=steps,
        gpu_bytes=machine.memory_bytes if machine.has_gpus else 0,
    )
    return int(memory.peak.total)


def choose_strategy(
    model: Architecture, config: RunConfig, machine: Resources
) -> tuple[DDPStrategyConfig | FSDPStrategyConfig, str]:
    """The strategy with the least communication that fits, and the reason in one line.

    Measure the machine's link first, unless ddp fits.
    """

    def needs(strategy: DDPStrategyConfig | FSDPStrategyConfig) -> int:
        return needed_bytes(model, config, strategy, machine)

    usable = machine.usable_bytes
    whole = needs(DDPStrategyConfig())
    has = f"of {format_bytes(machine.memory_bytes)} on the smallest rank"
    if machine.world_size == 1:
        return DDPStrategyConfig(), f"a single rank needs {format_bytes(whole)} {has}"
    if whole <= usable:
        return (
            DDPStrategyConfig(),
            f"the whole model fits: {format_bytes(whole)} {has}, and ranks exchange gradients "
            "once per step",
        )
    link, inside = machine.link_bytes_per_s or 0.0, machine.local_world_size
    is_slow = link < SLOW_LINK
    why = f"the whole model needs {format_bytes(whole)} {has}; links carry "
    why += f"{format_bytes(int(link))}/s"
    if is_slow and machine.world_size > inside > 1:
        over_node = FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD")
        if (needed := needs(over_node)) <= usable:
            how = f"sharded over the {inside} ranks of a node it needs {format_bytes(needed)}"
            return over_node, f"{why}; {how}"
    if is_slow:
        gathered = FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP")
        if (needed := needs(gathered)) <= usable:
            how = "parameters stay gathered from forward to backward, with "
            return gathered, f"{why}; {how}{format_bytes(needed)}"
    cut = needs(FSDPStrategyConfig())
    why += f"; sharded over {machine.world_size} ranks it needs {format_bytes(cut)}"
    if cut > usable:
        why += ", which may not fit. Lower data.seq_length, set "
        why += "training.gradient_checkpointing: full, or strategy: {kind: fsdp, cpu_offload: true}"
    return FSDPStrategyConfig(), why

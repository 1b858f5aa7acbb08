"""`strategy: {kind: auto}`: the fastest strategy that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isles.config.balance import deal_layers
from isles.config.compilation import COMPILES_FROM, compiles
from isles.config.layout import Layout, Strategy, make_layout
from isles.config.memory import step_memory
from isles.config.roofline import (
    UNKNOWN_CHIP,
    Chip,
    Links,
    communication,
    count_of,
    optimizer_seconds,
    work_of,
)
from isles.config.rules import check_rules
from isles.config.rules.shape import check_shape
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.setting import usable_bytes
from isles.facts.units import format_bytes

Sharding = DDPStrategyConfig | FSDPStrategyConfig

_FASTER = 0.95
"""A strategy replaces one before it only if it takes at most this share of the seconds."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of the machines of a run, the same on every rank.

    Args:
        memory_bytes: memory of the rank with the least.
        links: links between the ranks. Not used if only one strategy fits.
        chip: speed of the slowest rank. If it is unknown, only communication is compared.
    """

    world_size: int
    local_world_size: int
    memory_bytes: int
    links: Links
    chip: Chip = UNKNOWN_CHIP

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.memory_bytes)

    @property
    def gpu_bytes(self) -> int:
        """Memory of a GPU; 0 on CPUs."""
        return self.memory_bytes if self.chip.is_cuda else 0

    def layout(self, strategy: Sharding) -> Layout:
        return make_layout(strategy, self.world_size, local_world_size=self.local_world_size)


def describe(strategy: Strategy) -> str:
    """Short name of a strategy."""
    if isinstance(strategy, FSDPStrategyConfig):
        offload = " offload" if strategy.cpu_offload else ""
        return f"fsdp {strategy.sharding_strategy}{offload}"
    is_pipeline = isinstance(strategy, DDPStrategyConfig) and strategy.pp_size > 1
    return "pipeline" if is_pipeline else strategy.kind


def fitting_pipeline(
    model: Architecture,
    config: RunConfig,
    shape: Mapping[str, Any],
    memory_bytes: Sequence[int],
    *,
    is_cuda: bool,
) -> DDPStrategyConfig | None:
    """A pipeline over all ranks, with layers by their memory. None: it does not fit, or a rule
    refuses it.

    Args:
        shape: the model's config.json.
        memory_bytes: memory of each rank.
    """
    ranks = len(memory_bytes)
    strategy = DDPStrategyConfig(pp_size=ranks)
    config = config.model_copy(update={"strategy": strategy})
    if ranks == 1 or any(check_rules(config)) or check_shape(config, shape):
        return None
    layout, limits = Layout(ranks, 1, 1, 1, 1), [usable_bytes(own) for own in memory_bytes]
    given, rows = config.training.micro_batch_size, config.training.global_batch_size
    micro = min(rows, given if isinstance(given, int) else 1)
    options = {"rows": micro, "micro_batches": -(-rows // micro)}
    options["gpu_bytes"] = min(memory_bytes) if is_cuda else 0
    equal, gpu_bytes = [1.0] * ranks, options["gpu_bytes"]
    cut = deal_layers(
        model, config, strategy, layout, speeds=equal, limits=limits, gpu_bytes=gpu_bytes
    )
    layout = replace(layout, cut=cut)
    for rank, limit in enumerate(limits):
        memory = step_memory(model, config, strategy, layout, pp_rank=rank, **options)
        if memory.peak.total > limit:
            return None
    return strategy


def needed_bytes(
    model: Architecture,
    config: RunConfig,
    strategy: Sharding,
    machine: Resources,
    rows: int = 1,
) -> int:
    """Memory of a rank under a strategy, with micro-batches of `rows` sequences."""
    layout = machine.layout(strategy)
    memory = step_memory(
        model,
        config,
        strategy,
        layout,
        rows=rows,
        micro_batches=_steps(config, layout, rows),
        gpu_bytes=machine.gpu_bytes,
    )
    return int(memory.peak.total)


def fitting_strategies(
    model: Architecture, config: RunConfig, machine: Resources
) -> list[tuple[Sharding, int]]:
    """Strategies that fit, and their memory. `auto` takes the first of equally fast ones.

    On CPUs, and if the speed of a GPU is unknown, ddp is the only one if it fits. gloo scatters by
    a whole all-reduce, so that sharding sends no less, and an unknown GPU may hide what ddp sends.
    The same holds for qlora: ddp sends the gradients of an adapter, and sharding also all weights.
    """
    found = []
    for strategy in _strategies(machine):
        needed = needed_bytes(model, config, strategy, machine)
        if needed <= machine.usable_bytes:
            found.append((strategy, needed))
            is_known = machine.chip.is_cuda and machine.chip.flops
            may_differ = is_known and config.adapter.type != "qlora"
            if isinstance(strategy, DDPStrategyConfig) and not may_differ:
                break
    return found


def choose_strategy(
    model: Architecture,
    config: RunConfig,
    machine: Resources,
    fitting: Sequence[tuple[Sharding, int]] | None = None,
) -> tuple[Sharding, str]:
    """The fastest strategy that fits, and the reason in one line.

    If several strategies fit, the machine's links must be known.

    Args:
        fitting: strategies that fit, if they are known already.
    """
    has = f"of {format_bytes(machine.memory_bytes)} on the smallest rank"
    if fitting is None:
        fitting = fitting_strategies(model, config, machine)
    if not fitting and (offload := _offload(model, config, machine)) is not None:
        why = f"nothing else fits in the {format_bytes(machine.memory_bytes)} of the smallest rank"
        return offload, f"{why}, and blocks that do not fit on a GPU stay in main memory"
    if machine.world_size == 1:
        whole = needed_bytes(model, config, DDPStrategyConfig(), machine)
        return DDPStrategyConfig(), f"a single rank needs {format_bytes(whole)} {has}"
    if not fitting:
        cut = needed_bytes(model, config, FSDPStrategyConfig(), machine)
        why = f"sharded over {machine.world_size} ranks it needs {format_bytes(cut)} {has}, which "
        why += "may not fit. Lower data.seq_length, set training.gradient_checkpointing: full, or "
        return FSDPStrategyConfig(), f"{why}strategy: {{kind: fsdp, cpu_offload: true}}"
    chosen, needed = fitting[0]
    why = f"{_words(chosen, machine)} {format_bytes(needed)} {has}"
    if len(fitting) == 1:
        return chosen, why
    seconds = {describe(s): step_seconds(model, config, s, machine) for s, _ in fitting}
    most, best = seconds[describe(chosen)], min(seconds.values())
    if most * _FASTER <= best:
        return chosen, f"{why}, and no other strategy that fits is faster"
    other = describe(chosen)
    chosen, needed = next(each for each in fitting if seconds[describe(each[0])] <= best / _FASTER)
    share = seconds[describe(chosen)] / most
    why = f"{_words(chosen, machine)} {format_bytes(needed)} {has}"
    return chosen, f"{why}, and takes {share:.0%} of the time of {other}"


def step_seconds(
    model: Architecture, config: RunConfig, strategy: Sharding, machine: Resources
) -> float:
    """Seconds of a step on the slowest rank, with even rows. If its speed is unknown, seconds of
    communication alone."""
    layout = machine.layout(strategy)
    rows = _micro_batch(model, config, strategy, machine)
    steps = _steps(config, layout, rows)
    count = count_of(model, config, strategy, layout, rows, steps, machine.gpu_bytes)
    sent = communication(config, strategy, layout, machine.links, count, steps)
    capability = COMPILES_FROM if machine.chip.flops else None
    is_compiled = compiles(config, capability, config.training.max_steps)
    work = work_of(count, layout, is_compiled=is_compiled)
    micro_s = work.seconds(machine.chip)
    if micro_s is None:
        return sent.exposed_s(steps, 0.0, 1.0)
    seconds = steps * micro_s + sent.exposed_s(steps, micro_s, 1.0 - work.forward_share)
    return seconds + optimizer_seconds(count, machine.chip, layout)


def _strategies(machine: Resources) -> list[Sharding]:
    found: list[Sharding] = [DDPStrategyConfig(), FSDPStrategyConfig()]
    if machine.world_size > machine.local_world_size > 1:
        found.append(FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD"))
    return [*found, FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP")]


def _offload(
    model: Architecture, config: RunConfig, machine: Resources
) -> FSDPStrategyConfig | None:
    # None: there is no GPU, a rule refuses it, or a block alone is too large for a GPU.
    strategy = FSDPStrategyConfig(cpu_offload="auto")
    if not machine.chip.is_cuda or any(
        check_rules(config.model_copy(update={"strategy": strategy}))
    ):
        return None
    layout = machine.layout(strategy)
    options = {"rows": 1, "micro_batches": _steps(config, layout, 1)}
    options["gpu_bytes"] = machine.gpu_bytes
    all_blocks = model.layers
    memory = step_memory(model, config, strategy, layout, offloaded=all_blocks, **options)
    return strategy if memory.peak.total <= machine.usable_bytes else None


def _words(strategy: Sharding, machine: Resources) -> str:
    match strategy:
        case DDPStrategyConfig():
            return "the whole model fits:"
        case FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD"):
            return f"sharded over the {machine.local_world_size} ranks of a node it needs"
        case FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP"):
            return "weights are gathered once per step; it needs"
        case _:
            return f"sharded over {machine.world_size} ranks it needs"


def _rows(config: RunConfig, layout: Layout) -> int:
    return max(1, -(-config.training.global_batch_size // layout.dp_size))


def _steps(config: RunConfig, layout: Layout, rows: int) -> int:
    return -(-_rows(config, layout) // rows)


def _micro_batch(
    model: Architecture, config: RunConfig, strategy: Sharding, machine: Resources
) -> int:
    # The given one, or a power of two that fits.
    most, wanted = _rows(config, machine.layout(strategy)), config.training.micro_batch_size
    given = [wanted] if isinstance(wanted, int) else []
    if isinstance(wanted, dict):
        given = [rows for rows in wanted.values() if isinstance(rows, int)]
    if given:
        return min(most, *given)
    rows = 1
    while (
        rows < most
        and needed_bytes(model, config, strategy, machine, 2 * rows) <= machine.usable_bytes
    ):
        rows *= 2
    return min(rows, most)

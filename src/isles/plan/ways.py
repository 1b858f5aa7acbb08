"""Other ways to train the same run: memory-saving options, and every strategy.

The options have the order of `isles.config.fit`, the cheapest first, each with its price. An option
keeps the changes of the options before it. Adapters are the exception, as they train other weights.
Changes that contradict an option are not kept either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isles.config.layout import Strategy
from isles.config.rules import check_rules
from isles.config.sections.model import AdapterConfig
from isles.config.sections.strategy import (
    AutoStrategy,
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.config.sections.training import Precision
from isles.facts.gpus import lacking
from isles.facts.units import format_bytes
from isles.plan.outcome import Outcome
from isles.plan.step import Job, chosen, outcome, with_values

SHORTER = "shorter context"

_SHORTEST = 256
"""Fewest tokens per sequence: shorter sequences are another task."""

Changes = dict[str, object]


@dataclass(frozen=True, slots=True)
class Rung:
    """One memory-saving option.

    Args:
        name: its setting.
        changes: dotted keys of the run file and their values, with the earlier options it keeps.
        price: its cost, other than time. Empty: none.
        slower: seconds per step over the seconds of the run as written. None: unknown.
        is_first: whether it is the first option that fits.
    """

    name: str
    changes: Changes
    outcome: Outcome
    price: str = ""
    slower: float | None = None
    is_first: bool = False


def climb(job: Job, own: Outcome) -> list[Rung]:
    """All memory-saving options that apply to this run. The first that fits is marked."""
    found: list[Rung] = []
    before = own.time.total_s if own.time else None
    is_found = False
    for name, changes, price in _rungs(job, own):
        config = with_values(job.config, changes)
        result = outcome(job, config) if changes else own
        if result.refused:
            continue
        slower = None
        if before and result.time:
            slower = result.time.total_s / before
        is_first = not is_found and result.fits is True
        is_found = is_found or is_first
        found.append(Rung(name, changes, result, price, slower, is_first))
    return found


def _rungs(job: Job, own: Outcome) -> Iterator[tuple[str, Changes, str]]:
    config, training = job.config, job.config.training
    kept: Changes = {}
    yield "as written", {}, ""
    if isinstance(training.micro_batch_size, int) and training.micro_batch_size > 1:
        kept |= {"training.micro_batch_size": "auto"}
        yield "micro_batch_size: auto, with more accumulation", dict(kept), ""
    if training.precision == "32-true":
        narrow = _narrow(job)
        kept |= {"training.precision": narrow}
        yield f"precision: {narrow}", dict(kept), "16-bit products"
    if training.optimizer == "adamw":
        kept |= {"training.optimizer": "adamw_8bit"}
        yield "optimizer: adamw_8bit", dict(kept), "needs torchao"
    order = ("none", "selective", "full", "offload")
    for how in order[order.index(training.gradient_checkpointing) + 1 :]:
        changes = kept | {"training.gradient_checkpointing": how}
        if how != "offload":  # a compiled run, and zbv, refuse it
            kept = changes
        price = "computes again, and copies" if how == "offload" else "computes again"
        yield f"gradient_checkpointing: {how}", dict(changes), price
    whole = dict(kept)
    can_cut = len(job.machines.devices) > 1
    # Keep the strategy of the run file, unless it holds the whole model on every rank.
    is_cut = isinstance(own.strategy, FSDPStrategyConfig)
    if can_cut and isinstance(own.strategy, DDPStrategyConfig | AutoStrategy):
        kept |= {"strategy": FSDPStrategyConfig()}
        is_cut = True
        yield "strategy: {kind: fsdp}", dict(kept), "communication"
    stages = _pipeline(job, own)
    if stages is not None:
        # Options after it keep fsdp, with which they save more.
        name = f"strategy: {{kind: ddp, pp_size: {stages.pp_size}}}"
        yield name, {**whole, "strategy": stages}, "waits for other stages"
    if config.model.init == "pretrained" and config.adapter.type == "none":
        changes = {**kept, **_without_fp8(job), "adapter": AdapterConfig(type="lora")}
        yield "adapter: {type: lora}", changes, "trains an adapter"
    yield from (options := list(_qlora(job, whole)))
    if stages is not None and options:
        changes = {**options[0][1], "strategy": stages}
        yield "adapter: {type: qlora} in a pipeline", changes, "waits for other stages"
    if training.precision != "bf16-true" and config.adapter.type == "none":
        kept |= {"training.precision": "bf16-true"}
        if training.optimizer in ("adamw", "adamw_8bit"):
            kept |= {"training.stochastic_rounding": True}
        yield "precision: bf16-true, rounded at random", dict(kept), "noise; needs torchao"
    if is_cut or len(job.machines.devices) == 1:
        yield from _offload(job, whole, kept)
    yield from _shorter(job, whole)


def _pipeline(job: Job, own: Outcome) -> DDPStrategyConfig | None:
    # A stage on each GPU, if the run does not cut its matrices, sequences or layers yet.
    stages, grid = len(job.machines.devices), own.strategy
    if stages == 1 or not isinstance(grid, DDPStrategyConfig | FSDPStrategyConfig):
        return None
    is_cut = max(grid.tp_size, grid.cp_size, grid.pp_size) > 1
    return None if is_cut else DDPStrategyConfig(pp_size=stages)


def _narrow(job: Job) -> Precision:
    # Old GPUs only emulate bf16.
    gpus = [device.gpu for device in job.machines.devices]
    olds = [g for g in gpus if g and lacking("bf16-mixed", g.capability, is_nvidia=g.is_nvidia)]
    return "fp16-mixed" if olds else "bf16-mixed"


def _without_fp8(job: Job) -> Changes:
    # fp8-mixed refuses adapters.
    is_fp8 = job.config.training.precision == "fp8-mixed"
    return {"training.precision": "bf16-mixed"} if is_fp8 else {}


def _qlora(job: Job, kept: Changes) -> Iterator[tuple[str, Changes, str]]:
    if job.config.model.init == "pretrained" and job.config.adapter.type != "qlora":
        own = job.config.adapter.model_dump()
        adapter = AdapterConfig(**{**own, "type": "qlora"})
        changes: Changes = {**kept, **_without_fp8(job), "adapter": adapter}
        changes |= {"strategy": DDPStrategyConfig()}
        yield "adapter: {type: qlora}", changes, "trains an adapter"
        if len(job.machines.devices) > 1:
            changes = {**changes, "strategy": FSDPStrategyConfig()}
            yield "adapter: {type: qlora} with fsdp", changes, "communication"


def _offload(job: Job, whole: Changes, kept: Changes) -> Iterator[tuple[str, Changes, str]]:
    # With the state in main memory, an 8-bit state and 16-bit weights save nothing.
    exact = {key: value for key, value in whole.items() if key != "training.optimizer"}
    strategy = _offloaded(job)
    how = "auto" if strategy.cpu_offload == "auto" else "true"
    name = f"strategy: {{kind: fsdp, cpu_offload: {how}}}"
    yield name, {**exact, "strategy": strategy}, "main memory"


def _offloaded(job: Job) -> FSDPStrategyConfig:
    # Only what does not fit, if the optimizer allows it.
    strategy = FSDPStrategyConfig(cpu_offload="auto")
    config = job.config.model_copy(update={"strategy": strategy})
    return strategy if not any(check_rules(config)) else FSDPStrategyConfig(cpu_offload=True)


def _shorter(job: Job, whole: Changes) -> Iterator[tuple[str, Changes, str]]:
    # With all options that save most. For a pretrained model that is an adapter.
    kept = dict(whole)
    for _, changes, _ in _qlora(job, whole):
        kept = changes
    length = job.config.data.seq_length
    while length // 2 >= _SHORTEST:
        length //= 2
        yield f"seq_length: {length}", {**kept, "data.seq_length": length}, SHORTER


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, and the plan of the run under it.

    Args:
        changes: dotted keys of the run file and their values.
        note: another effect of it.
    """

    name: str
    changes: dict[str, object]
    outcome: Outcome
    is_chosen: bool = False
    note: str = ""


def name_of(strategy: Strategy) -> str:
    """Short name of a strategy."""
    match strategy:
        case DDPStrategyConfig():
            name = "ddp"
        case FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD"):
            name = "hsdp HYBRID_SHARD"
        case FSDPStrategyConfig():
            name = f"fsdp {strategy.sharding_strategy}"
        case DeepSpeedStrategyConfig(config_file=str(file)):
            name = f"deepspeed {file}"
        case DeepSpeedStrategyConfig():
            name = f"deepspeed ZeRO {strategy.zero_stage}"
        case AutoStrategy():
            return "auto"
    if isinstance(strategy, DDPStrategyConfig | FSDPStrategyConfig):
        sizes = {"tp": strategy.tp_size, "cp": strategy.cp_size, "pp": strategy.pp_size}
        name += "".join(f" {axis} {size}" for axis, size in sizes.items() if size > 1)
    if isinstance(strategy, FSDPStrategyConfig) and strategy.cpu_offload:
        name += " auto offload" if strategy.cpu_offload == "auto" else " offload"
    return name


def compare(job: Job, own: Outcome) -> list[Candidate]:
    """Plans of the run under every strategy: the chosen strategy, then the rest by fit and speed.

    Args:
        own: plan of the run as written.
    """
    note = ""
    if isinstance(job.config.strategy, AutoStrategy):
        note = f"strategy auto: {chosen(job, job.config)[1]}"
    first = Candidate(name_of(own.strategy), {}, own, is_chosen=True, note=note)
    others = []
    for name, changes, text in _others(job):
        if name == first.name and "adapter" not in changes:
            continue
        found = outcome(job, with_values(job.config, changes))
        others.append(Candidate(name, changes, found, note=text))
    return [first, *sorted(others, key=_order)]


def _order(candidate: Candidate) -> tuple[int, float]:
    found = candidate.outcome
    rank = 3 if found.refused else {True: 0, None: 1, False: 2}[found.fits]
    if found.refused:
        return rank, 0.0
    return rank, found.time.total_s if found.time else found.tightest.peak_bytes


def _others(job: Job) -> Iterator[tuple[str, dict[str, object], str]]:
    world, local = len(job.machines.devices), job.machines.local_world_size
    yield from _plain(DDPStrategyConfig())
    if world == 1:
        yield from _plain(_offloaded(job))
    else:
        yield from _plain(FSDPStrategyConfig())
        yield from _plain(FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP"))
        if len(job.machines.hosts) > 1 and local > 1:
            yield from _plain(FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD"))
        yield from _plain(_offloaded(job))
        for stage in (1, 2, 3):
            yield from _plain(DeepSpeedStrategyConfig(zero_stage=stage))
        inside = local if local > 1 else world
        yield from _plain(FSDPStrategyConfig(tp_size=inside))
        stages = len(job.machines.hosts) if len(job.machines.hosts) > 1 else 2
        yield from _plain(DDPStrategyConfig(pp_size=stages))
    if job.config.adapter.type != "qlora" and job.config.model.init == "pretrained":
        adapter = AdapterConfig(**{**job.config.adapter.model_dump(), "type": "qlora"})
        whole: Changes = {"adapter": adapter, "strategy": DDPStrategyConfig()}
        yield "ddp QLoRA", whole, "trains an adapter"
        if world > 1:
            yield "fsdp QLoRA", whole | {"strategy": FSDPStrategyConfig()}, "trains an adapter"


def _plain(
    strategy: DDPStrategyConfig | FSDPStrategyConfig | DeepSpeedStrategyConfig,
) -> Iterator[tuple[str, dict[str, object], str]]:
    yield name_of(strategy), {"strategy": strategy}, ""


def offload_rows(own: Outcome, layers: int) -> Iterator[tuple[str, str]]:
    """Blocks that each rank keeps in main memory under `cpu_offload: auto`, and what that costs.

    Args:
        layers: of the model.

    Yields:
        Name and text of a row. Nothing if no rank keeps blocks there.
    """
    found = [
        f"rank {rank} {each.offloaded} of {layers} blocks, which copies "
        f"{format_bytes(each.copied_bytes)} for each micro-batch"
        for rank, each in enumerate(own.ranks)
        if each.offloaded
    ]
    if found:
        more = f"; and {len(found) - 3} more ranks" if len(found) > 3 else ""
        yield "In main memory", "; ".join(found[:3]) + more


def stage_rows(own: Outcome) -> Iterator[tuple[str, str]]:
    """Layers of each rank of a pipeline, and the shares of a step that its ranks do not compute.

    Yields:
        Name and text of a row. Nothing without a pipeline, or if the speed of a device is unknown.
    """
    layout, time = own.layout, own.time
    if layout is None or layout.pp == 1 or time is None:
        return
    layers = {layout.place(rank).pp: each.layers for rank, each in enumerate(own.ranks)}
    counts = " + ".join(str(layers[stage]) for stage in range(layout.pp))
    parts = {
        "while the pipeline fills and empties": time.bubble_s,
        "for slower stages": time.idle_s,
        "for the link": time.exposed_s,
    }
    waits = [f"{seconds / time.total_s:.0%} {why}" for why, seconds in parts.items()]
    yield "Pipeline", f"layers {counts}; of a step, ranks wait {', '.join(waits)}"

"""Every way to hold the model on the machines of a cluster, the chosen one first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isles.config.layout import Strategy
from isles.config.sections.model import AdapterConfig
from isles.config.sections.strategy import (
    AutoStrategy,
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.plan.step import Job, Outcome, chosen, outcome, with_values


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, and what becomes of the run under it.

    Args:
        changes: dotted keys of the run file and their values.
        note: what else it means.
    """

    name: str
    changes: dict[str, object]
    outcome: Outcome
    is_chosen: bool = False
    note: str = ""


def name_of(strategy: Strategy) -> str:
    """A strategy in a word or two."""
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
        name += " offload"
    return name


def compare(job: Job, own: Outcome) -> list[Candidate]:
    """The run under every strategy, the chosen one first, then those that fit by their speed.

    Args:
        own: what becomes of the run as it is written.
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
        yield "fsdp FULL_SHARD offload", {"strategy": FSDPStrategyConfig(cpu_offload=True)}, ""
    else:
        yield from _plain(FSDPStrategyConfig())
        yield from _plain(FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP"))
        if len(job.machines.hosts) > 1 and local > 1:
            yield from _plain(FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD"))
        yield "fsdp FULL_SHARD offload", {"strategy": FSDPStrategyConfig(cpu_offload=True)}, ""
        for stage in (1, 2, 3):
            yield from _plain(DeepSpeedStrategyConfig(zero_stage=stage))
        inside = local if local > 1 else world
        yield from _plain(FSDPStrategyConfig(tp_size=inside))
        stages = len(job.machines.hosts) if len(job.machines.hosts) > 1 else 2
        yield from _plain(DDPStrategyConfig(pp_size=stages))
    if job.config.adapter.type != "qlora" and job.config.model.init == "pretrained":
        adapter = AdapterConfig(**{**job.config.adapter.model_dump(), "type": "qlora"})
        changes: dict[str, object] = {"adapter": adapter, "strategy": DDPStrategyConfig()}
        yield "ddp QLoRA", changes, "trains an adapter"


def _plain(
    strategy: DDPStrategyConfig | FSDPStrategyConfig | DeepSpeedStrategyConfig,
) -> Iterator[tuple[str, dict[str, object], str]]:
    yield name_of(strategy), {"strategy": strategy}, ""

"""The ladder of docs/one-machine.md: what makes a run fit, the cheapest first, with its price.

Each rung keeps the changes of those below it, but for adapters, which train something else, and
what cannot go together with one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isles.config.sections.model import AdapterConfig
from isles.config.sections.strategy import (
    AutoStrategy,
    DDPStrategyConfig,
    FSDPStrategyConfig,
)
from isles.plan.step import Job, Outcome, outcome, with_values

SHORTER = "shorter context"

_SHORTEST = 256
"""Tokens: shorter sequences are another task."""

Changes = dict[str, object]


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung.

    Args:
        name: what it does, in words.
        changes: dotted keys of the run file and their values, of all rungs that it keeps.
        price: what it costs besides time; empty: nothing.
        slower: seconds of a step over those of the run as it is written; None: not known.
        is_first: the first that fits.
    """

    name: str
    changes: Changes
    outcome: Outcome
    price: str = ""
    slower: float | None = None
    is_first: bool = False


def climb(job: Job, own: Outcome) -> list[Rung]:
    """All rungs that mean something to this run; the first that fits is marked."""
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
        kept |= {"training.precision": "bf16-mixed"}
        yield "precision: bf16-mixed", dict(kept), "products in 16 bits"
    if training.optimizer == "adamw":
        kept |= {"training.optimizer": "adamw_8bit"}
        yield "optimizer: adamw_8bit", dict(kept), "needs torchao"
    order = ("none", "selective", "full")
    for how in order[order.index(training.gradient_checkpointing) + 1 :]:
        kept |= {"training.gradient_checkpointing": how}
        yield f"gradient_checkpointing: {how}", dict(kept), "computes again"
    whole = dict(kept)
    can_cut = len(job.machines.devices) > 1 and config.adapter.type != "qlora"
    # A strategy that was asked for stays, unless every rank holds the whole model in it.
    is_cut = isinstance(own.strategy, FSDPStrategyConfig)
    if can_cut and isinstance(own.strategy, DDPStrategyConfig | AutoStrategy):
        kept |= {"strategy": FSDPStrategyConfig()}
        is_cut = True
        yield "strategy: {kind: fsdp}", dict(kept), "communication"
    if config.model.init == "pretrained" and config.adapter.type == "none":
        adapter = AdapterConfig(type="lora")
        yield "adapter: {type: lora}", {**kept, "adapter": adapter}, "trains an adapter"
    yield from _qlora(job, whole)
    if training.precision != "bf16-true" and config.adapter.type == "none":
        kept |= {"training.precision": "bf16-true"}
        if training.optimizer in ("adamw", "adamw_8bit"):
            kept |= {"training.stochastic_rounding": True}
        yield "precision: bf16-true, rounded at random", dict(kept), "noise; needs torchao"
    if config.adapter.type != "qlora" and (is_cut or len(job.machines.devices) == 1):
        yield from _offload(job, whole, kept)
    yield from _shorter(job, whole)


def _qlora(job: Job, kept: Changes) -> Iterator[tuple[str, Changes, str]]:
    if job.config.model.init == "pretrained" and job.config.adapter.type != "qlora":
        own = job.config.adapter.model_dump()
        changes = {**kept, "adapter": AdapterConfig(**{**own, "type": "qlora"})}
        changes |= {"strategy": DDPStrategyConfig()}
        yield "adapter: {type: qlora}", changes, "trains an adapter"


def _offload(job: Job, whole: Changes, kept: Changes) -> Iterator[tuple[str, Changes, str]]:
    # The state in main memory needs none of its 8 bits, nor weights in 16.
    exact = {key: value for key, value in whole.items() if key != "training.optimizer"}
    strategy = FSDPStrategyConfig(cpu_offload=True)
    yield (
        "strategy: {kind: fsdp, cpu_offload: true}",
        {**exact, "strategy": strategy},
        "main memory",
    )


def _shorter(job: Job, whole: Changes) -> Iterator[tuple[str, Changes, str]]:
    # Beside all that trains the most that can be trained: of a pretrained model, an adapter.
    kept = dict(whole)
    for _, changes, _ in _qlora(job, whole):
        kept = changes
    length = job.config.data.seq_length
    while length // 2 >= _SHORTEST:
        length //= 2
        yield f"seq_length: {length}", {**kept, "data.seq_length": length}, SHORTER

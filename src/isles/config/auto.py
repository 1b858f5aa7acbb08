"""`strategy: {kind: auto}`: the strategy that fits, with the least communication."""

from __future__ import annotations

from dataclasses import dataclass

from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.facts.cost import (
    ModelSize,
    activation_bytes,
    copy_bytes,
    frozen_bytes,
    state_bytes,
    weight_bytes,
)
from isles.facts.units import format_bytes

_USABLE = 0.85
"""Of a rank's memory that a plan may fill; the rest is for fragmentation and the libraries."""

SLOW_LINK = 10e9
"""Bytes a second below which gathering parameters costs more than the computation it serves."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machines of a run have.

    `memory_bytes` is of the rank that has least; the link, between all ranks, is None where it was
    not needed.
    """

    world_size: int
    local_world_size: int
    memory_bytes: int
    link_bytes_per_s: float | None

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * _USABLE)


def describe(strategy: DDPStrategyConfig | FSDPStrategyConfig) -> str:
    """A strategy in a word or two."""
    if isinstance(strategy, DDPStrategyConfig):
        return "ddp"
    return f"fsdp {strategy.sharding_strategy}"


def ddp_bytes(size: ModelSize, training: TrainingConfig, seq_length: int) -> int:
    """Memory of a rank that holds the whole model, with micro-batches of one sequence."""
    precision = training.precision
    return (
        frozen_bytes(size.num_frozen, precision)
        + weight_bytes(size.num_trained, precision)
        + copy_bytes(size.num_trained, precision)
        + state_bytes(size.num_trained, precision, training.optimizer)
        + _activations(size, training, seq_length)
    )


def choose_strategy(
    size: ModelSize, training: TrainingConfig, seq_length: int, machine: Machine
) -> tuple[DDPStrategyConfig | FSDPStrategyConfig, str]:
    """The strategy with the least communication that fits, and the reason in one line.

    The machine's link must have been measured unless ddp fits.
    """
    usable = machine.usable_bytes
    whole = ddp_bytes(size, training, seq_length)
    has = f"of {format_bytes(machine.memory_bytes)} on the smallest rank"
    if machine.world_size == 1:
        return DDPStrategyConfig(), f"one rank, which needs {format_bytes(whole)} {has}"
    if whole <= usable:
        return (
            DDPStrategyConfig(),
            f"the whole model fits: {format_bytes(whole)} {has}, and gradients travel once a step",
        )
    link, inside = machine.link_bytes_per_s or 0.0, machine.local_world_size
    is_slow = link < SLOW_LINK
    why = f"the whole model needs {format_bytes(whole)} {has}; links carry "
    why += f"{format_bytes(int(link))}/s"

    def needs(ranks: int, *, gathers: bool) -> int:
        return _sharded(size, training, seq_length, ranks, gathers=gathers)

    over_node = needs(inside, gathers=False)
    if machine.world_size > inside > 1 and is_slow and over_node <= usable:
        return (
            FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD"),
            f"{why}; cut over the {inside} ranks of a node it needs {format_bytes(over_node)}",
        )
    gathered = needs(machine.world_size, gathers=True)
    if is_slow and gathered <= usable:
        return (
            FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP"),
            f"{why}; parameters stay gathered from forward to backward, with "
            f"{format_bytes(gathered)}",
        )
    cut = needs(machine.world_size, gathers=False)
    why += f"; cut over {machine.world_size} ranks it needs {format_bytes(cut)}"
    if cut > usable:
        why += "; even that may not fit: lower data.seq_length, set "
        why += "training.gradient_checkpointing: full, or strategy: {kind: fsdp, cpu_offload: true}"
    return FSDPStrategyConfig(), why


def _sharded(
    size: ModelSize, training: TrainingConfig, seq_length: int, ranks: int, *, gathers: bool
) -> int:
    # Bytes of a rank under FSDP; `gathers`: all parameters are whole between the passes.
    precision, params, trained = training.precision, size.num_params, size.num_trained
    cut = frozen_bytes(size.num_frozen, precision) + weight_bytes(trained, precision)
    cut += state_bytes(trained, precision, training.optimizer)
    # What is whole at a time: everything, or two blocks and the larger of embedding and head.
    ends = size.vocab_size * size.hidden_size
    blocks = max(0, params - 2 * ends) // max(1, size.num_layers)
    whole = params if gathers else 2 * blocks + ends
    gathered = copy_bytes(whole, precision) or weight_bytes(whole, precision)
    gradients = weight_bytes(whole * trained // max(1, params), precision)
    return cut // ranks + gathered + gradients + _activations(size, training, seq_length)


def _activations(size: ModelSize, training: TrainingConfig, seq_length: int) -> int:
    how = {"precision": training.precision, "checkpointing": training.gradient_checkpointing}
    return activation_bytes(size, 1, seq_length, **how)

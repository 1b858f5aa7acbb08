"""The rules between the keys of `strategy`, and between them and the rest of the run file."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.interop.rules import deepspeed_faults
from isles.config.issue import Violation
from isles.config.sections.base import Section
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
    MeshSection,
)

_DELETE = "delete it"


def strategy_rules(config: RunConfig) -> Iterator[Violation]:
    """Every rule about the strategy that is broken, as far as the file alone can tell."""
    strategy = config.strategy
    if isinstance(strategy, MeshSection):
        yield from _context_parallel(config, strategy)
        yield from _pipeline(config, strategy)
    if isinstance(strategy, DDPStrategyConfig):
        yield from _ddp(config, strategy)
    if isinstance(strategy, FSDPStrategyConfig):
        yield from _fsdp(strategy)
    if isinstance(strategy, DeepSpeedStrategyConfig):
        yield from _deepspeed(config, strategy)


def nearest_multiples(number: int, unit: int) -> str:
    """The multiples of `unit` next to `number`, as a fix: `384 or 576`."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _context_parallel(config: RunConfig, strategy: MeshSection) -> Iterator[Violation]:
    size, length = strategy.cp_size, config.data.seq_length
    if size == 1:
        yield from _means_nothing(strategy, "cp_method", "cp_size 1", "use a larger cp_size")
        return
    if length % size:
        yield Violation(
            ("strategy.cp_size", "data.seq_length"),
            f"cp_size {size} does not divide seq_length {length}",
            f"use data.seq_length: {nearest_multiples(length, size)}, or another cp_size",
        )
    if config.model.attn_implementation == "eager":
        yield Violation(
            ("model.attn_implementation", "strategy.cp_size"),
            f"attn_implementation eager cannot be had with cp_size {size}, which brings an "
            "attention of its own",
            "use attn_implementation: sdpa, or cp_size: 1",
        )


def _pipeline(config: RunConfig, strategy: MeshSection) -> Iterator[Violation]:
    if strategy.pp_size == 1:
        yield from _means_nothing(strategy, "pp_schedule", "pp_size 1", "use a larger pp_size")
        return
    if config.training.torch_compile:
        yield Violation(
            ("training.torch_compile", "strategy.pp_size"),
            f"torch_compile does not go together with pp_size {strategy.pp_size}",
            "set torch_compile: false, or pp_size: 1",
        )
    if strategy.pp_schedule == "zbv" and config.training.gradient_checkpointing == "selective":
        yield Violation(
            ("training.gradient_checkpointing", "strategy.pp_schedule"),
            "pp_schedule zbv goes backwards twice, and what gradient_checkpointing selective "
            "recomputes is there once",
            "use gradient_checkpointing: full or none, or another pp_schedule",
        )
    if config.training.precision == "fp16-mixed":
        yield Violation(
            ("training.precision", "strategy.pp_size"),
            f"fp16-mixed scales the loss, and a pipeline (pp_size {strategy.pp_size}) knows it "
            "only on its last stage",
            "use precision: bf16-mixed or 32-true",
        )


def _ddp(config: RunConfig, strategy: DDPStrategyConfig) -> Iterator[Violation]:
    cut = next((name for name in ("tp_size", "pp_size") if getattr(strategy, name) > 1), None)
    if cut is not None:
        for name in ("bucket_cap_mb", "gradient_compression", "static_graph"):
            yield from _means_nothing(
                strategy,
                name,
                f"{cut} {getattr(strategy, cut)}: gradients then travel as FSDP2 sends them",
                f"set {cut}: 1",
            )
    elif strategy.gradient_compression != "none" and config.training.precision == "bf16-true":
        yield Violation(
            ("strategy.gradient_compression", "training.precision"),
            f"gradient_compression {strategy.gradient_compression} means nothing to precision "
            "bf16-true: gradients are bf16 already",
            f"{_DELETE}, or use precision: bf16-mixed",
        )


def _fsdp(strategy: FSDPStrategyConfig) -> Iterator[Violation]:
    if not strategy.sharding_strategy.startswith("HYBRID_SHARD"):
        yield from _means_nothing(
            strategy,
            "shard_size",
            f"sharding_strategy {strategy.sharding_strategy}",
            "use sharding_strategy: HYBRID_SHARD",
            "strategy.sharding_strategy",
        )


def _deepspeed(config: RunConfig, strategy: DeepSpeedStrategyConfig) -> Iterator[Violation]:
    if (
        strategy.config_file is None
    ):  # what a file says of these counts too, so it is compared whole
        yield from _offload(strategy)
    yield from deepspeed_faults(config)


def _offload(strategy: DeepSpeedStrategyConfig) -> Iterator[Violation]:
    stage = strategy.zero_stage
    if strategy.offload_param != "none" and stage < 3:
        yield Violation(
            ("strategy.offload_param", "strategy.zero_stage"),
            f"offload_param {strategy.offload_param} needs parameters that are cut over the ranks, "
            f"and zero_stage {stage} leaves them whole",
            f"use zero_stage: 3, or {_DELETE}",
        )
    if strategy.offload_optimizer == "nvme" and stage < 3:
        yield Violation(
            ("strategy.offload_optimizer", "strategy.zero_stage"),
            f"DeepSpeed offloads the optimizer to nvme with zero_stage 3 only, not {stage}",
            "use zero_stage: 3, or offload_optimizer: cpu",
        )
    offloads = ("offload_optimizer", "offload_param")
    to_nvme = [name for name in offloads if getattr(strategy, name) == "nvme"]
    if to_nvme and strategy.nvme_path is None:
        yield Violation(
            tuple(f"strategy.{name}" for name in to_nvme),
            f"{' and '.join(to_nvme)} nvme {'need' if len(to_nvme) > 1 else 'needs'} a folder on "
            "that disk",
            "add nvme_path: with a folder on a fast disk of every node",
        )
    if not to_nvme:
        yield from _means_nothing(
            strategy, "nvme_path", "a run that offloads nothing to nvme", "use offload_param: nvme"
        )


def _means_nothing(
    strategy: Section, name: str, to: str, instead: str, *others: str
) -> Iterator[Violation]:
    """A key that was given a value where it has no effect. Its default is no value given: a file
    that `isles config show` wrote names every key."""
    value = getattr(strategy, name)
    if value != type(strategy).model_fields[name].default:
        shown = str(value).lower() if isinstance(value, bool) else f"{value}"
        yield Violation(
            (f"strategy.{name}", *others),
            f"{name} {shown} means nothing to {to}",
            f"{_DELETE}, or {instead}",
        )

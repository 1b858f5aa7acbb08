"""The rules of `strategy`, of the whole run and of a cluster that has one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from isles.config.issues import Issue, nearest_multiples, no_effect
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
    MeshSection,
)


def strategy_rules(config: RunConfig) -> Iterator[Issue]:
    """Every rule of a strategy that is broken, as far as the file alone can tell."""
    yield from _rules(config)
    for index, cluster in enumerate(config.clusters):
        if cluster.strategy is None:
            continue
        own = f"clusters.{index}.strategy"
        for issue in _rules(config.model_copy(update={"strategy": cluster.strategy})):
            keys = (
                own + key.removeprefix("strategy") if key.partition(".")[0] == "strategy" else key
                for key in issue.keys
            )
            yield replace(issue, keys=tuple(keys))


def _rules(config: RunConfig) -> Iterator[Issue]:
    strategy = config.strategy
    if isinstance(strategy, MeshSection):
        yield from _context_parallel(config, strategy)
        yield from _pipeline(config, strategy)
    if isinstance(strategy, DDPStrategyConfig):
        yield from _ddp(config, strategy)
    if isinstance(strategy, FSDPStrategyConfig) and "HYBRID" not in strategy.sharding_strategy:
        key, to = "strategy.sharding_strategy", f"sharding_strategy {strategy.sharding_strategy}"
        use = "use sharding_strategy: HYBRID_SHARD"
        yield from no_effect(strategy, "strategy.shard_size", to, use, key)
    if isinstance(strategy, DeepSpeedStrategyConfig):
        yield from _deepspeed(config, strategy)


def _context_parallel(config: RunConfig, strategy: MeshSection) -> Iterator[Issue]:
    size, length = strategy.cp_size, config.data.seq_length
    if size == 1:
        use = "use a larger cp_size"
        yield from no_effect(strategy, "strategy.cp_method", "cp_size 1", use)
        return
    if length % size:
        yield Issue(
            ("strategy.cp_size", "data.seq_length"),
            f"cp_size {size} does not divide seq_length {length}",
            f"use data.seq_length: {nearest_multiples(length, size)}, or another cp_size",
        )
    if config.model.attn_implementation == "eager":
        yield Issue(
            ("model.attn_implementation", "strategy.cp_size"),
            f"attn_implementation eager cannot be had with cp_size {size}, which brings an "
            "attention of its own",
            "use attn_implementation: sdpa, or cp_size: 1",
        )


def _pipeline(config: RunConfig, strategy: MeshSection) -> Iterator[Issue]:
    training, size = config.training, strategy.pp_size
    if size == 1:
        use = "use a larger pp_size"
        yield from no_effect(strategy, "strategy.pp_schedule", "pp_size 1", use)
        return
    if training.torch_compile:
        yield Issue(
            ("training.torch_compile", "strategy.pp_size"),
            f"torch_compile does not go together with pp_size {size}",
            "set torch_compile: false, or pp_size: 1",
        )
    if strategy.pp_schedule == "zbv" and training.gradient_checkpointing == "selective":
        yield Issue(
            ("training.gradient_checkpointing", "strategy.pp_schedule"),
            "pp_schedule zbv goes backwards twice, and what gradient_checkpointing selective "
            "recomputes is there once",
            "use gradient_checkpointing: full or none, or another pp_schedule",
        )
    if training.precision == "fp16-mixed":
        yield Issue(
            ("training.precision", "strategy.pp_size"),
            f"fp16-mixed scales the loss, and a pipeline (pp_size {size}) knows it only on its "
            "last stage",
            "use precision: bf16-mixed or 32-true",
        )


def _ddp(config: RunConfig, strategy: DDPStrategyConfig) -> Iterator[Issue]:
    cut = next((name for name in ("tp_size", "pp_size") if getattr(strategy, name) > 1), None)
    key, precision = "strategy.gradient_compression", "training.precision"
    if cut is not None:
        to = f"{cut} {getattr(strategy, cut)}: gradients then travel as FSDP2 sends them"
        for name in ("strategy.bucket_cap_mb", key, "strategy.static_graph"):
            yield from no_effect(strategy, name, to, f"set {cut}: 1")
    elif config.training.precision == "bf16-true":
        to = "precision bf16-true: gradients are bf16 already"
        yield from no_effect(strategy, key, to, "use precision: bf16-mixed", precision)


def _deepspeed(config: RunConfig, strategy: DeepSpeedStrategyConfig) -> Iterator[Issue]:
    if strategy.config_file is None:
        # What a file says of these counts too, so it is compared whole: interop/deepspeed.py.
        yield from _offload(strategy)
    if config.training.optimizer == "muon":
        yield Issue(
            ("training.optimizer", "strategy.kind"),
            "muon works on whole matrices, and deepspeed cuts them into flat pieces",
            "use optimizer: adamw, or strategy: {kind: fsdp}",
        )
    if config.training.precision == "bf16-true":
        yield Issue(
            ("training.precision", "strategy.kind"),
            "bf16-true has no fp32 weights, and deepspeed's optimizer keeps them",
            "use bf16-mixed, with which deepspeed computes in bf16 and cuts the fp32 weights over "
            "the ranks; or strategy: {kind: fsdp}",
        )


def _offload(strategy: DeepSpeedStrategyConfig) -> Iterator[Issue]:
    stage = strategy.zero_stage
    if strategy.offload_param != "none" and stage < 3:
        yield Issue(
            ("strategy.offload_param", "strategy.zero_stage"),
            f"offload_param {strategy.offload_param} needs parameters that are cut over the ranks, "
            f"and zero_stage {stage} leaves them whole",
            "use zero_stage: 3, or delete it",
        )
    if strategy.offload_optimizer == "nvme" and stage < 3:
        yield Issue(
            ("strategy.offload_optimizer", "strategy.zero_stage"),
            f"DeepSpeed offloads the optimizer to nvme with zero_stage 3 only, not {stage}",
            "use zero_stage: 3, or offload_optimizer: cpu",
        )
    offloads = ("offload_optimizer", "offload_param")
    to_nvme = [name for name in offloads if getattr(strategy, name) == "nvme"]
    if to_nvme and strategy.nvme_path is None:
        yield Issue(
            tuple(f"strategy.{name}" for name in to_nvme),
            f"{' and '.join(to_nvme)} nvme {'need' if len(to_nvme) > 1 else 'needs'} a folder on "
            "that disk",
            "add nvme_path: with a folder on a fast disk of every node",
        )
    if not to_nvme:
        to, use = "a run that offloads nothing to nvme", "use offload_param: nvme"
        yield from no_effect(strategy, "strategy.nvme_path", to, use)

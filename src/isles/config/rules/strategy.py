"""The rules of `model`, `adapter` and `strategy`, also for the strategy of one cluster."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace

from isles.config.interop.deepspeed import offload_issues
from isles.config.issues import Issue, nearest_multiples, show_value
from isles.config.rules.idle import idle_keys, no_effect
from isles.config.sections.model import AdapterConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    AutoStrategy,
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
    MeshSection,
)
from isles.facts.models import shape_names


def strategy_rules(config: RunConfig) -> Iterator[Issue]:
    """Every broken rule of a strategy that needs only the run file."""
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
    yield from idle_keys(config, "strategy")
    if config.training.precision == "fp8-mixed":
        yield from _fp8(config)
    if isinstance(strategy, AutoStrategy) and strategy.pp_size not in (1, "auto"):
        yield Issue(
            ("strategy.pp_size", "strategy.kind"),
            f"pp_size is {strategy.pp_size}, and strategy auto chooses the number of stages",
            "set pp_size: auto, or kind: ddp for this number of stages",
        )
    if isinstance(strategy, MeshSection):
        yield from _context_parallel(config, strategy)
        yield from _pipeline(config, strategy)
    if isinstance(strategy, DDPStrategyConfig):
        yield from _ddp(config, strategy)
    if isinstance(strategy, DeepSpeedStrategyConfig):
        yield from _deepspeed(config, strategy)
    if isinstance(strategy, FSDPStrategyConfig):
        yield from _offload(config, strategy)


def _fp8(config: RunConfig) -> Iterator[Issue]:
    strategy, untried = config.strategy, dict[str, str]()
    if isinstance(strategy, DeepSpeedStrategyConfig):
        untried["strategy deepspeed"] = "strategy.kind"
    grid = strategy if isinstance(strategy, MeshSection) else MeshSection()
    for name in ("tp_size", "pp_size"):
        if (size := getattr(grid, name)) > 1:
            untried[f"{name} {size}"] = f"strategy.{name}"
    for what, key in untried.items():
        yield Issue(
            (key, "training.precision"),
            f"fp8-mixed was never tried with {what}",
            "use precision: bf16-mixed",
        )
    # The gradient of a weight is a product over tokens, and fp8 kernels need multiples of 16.
    unit, length = 16 * grid.cp_size, config.data.seq_length
    if length % unit:
        yield Issue(
            ("data.seq_length", "training.precision"),
            f"fp8-mixed needs a multiple of {unit} tokens per row, and seq_length is {length}",
            f"use data.seq_length: {nearest_multiples(length, unit)}, or precision: bf16-mixed",
        )


def _context_parallel(config: RunConfig, strategy: MeshSection) -> Iterator[Issue]:
    size, length = strategy.cp_size, config.data.seq_length
    if size == 1:
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
            f"attn_implementation eager does not work with cp_size {size}, which has its own "
            "attention",
            "use attn_implementation: sdpa, or cp_size: 1",
        )


def _pipeline(config: RunConfig, strategy: MeshSection) -> Iterator[Issue]:
    training, size = config.training, strategy.pp_size
    if size == 1:
        return
    if training.torch_compile is True:
        yield Issue(
            ("training.torch_compile", "strategy.pp_size"),
            f"torch_compile does not work with pp_size {size}",
            "set torch_compile: auto, or pp_size: 1",
        )
    kept = training.gradient_checkpointing
    if strategy.pp_schedule == "zbv" and kept in ("selective", "offload"):
        yield Issue(
            ("training.gradient_checkpointing", "strategy.pp_schedule"),
            "pp_schedule zbv needs recomputed activations twice, and gradient_checkpointing "
            f"{kept} keeps them for one use",
            "use gradient_checkpointing: full or none, or another pp_schedule",
        )
    if training.precision == "fp16-mixed":
        yield Issue(
            ("training.precision", "strategy.pp_size"),
            f"fp16-mixed does not work with pp_size {size}: only the last pipeline stage has the "
            "loss to scale",
            "use precision: bf16-mixed or 32-true",
        )


def _offload(config: RunConfig, strategy: FSDPStrategyConfig) -> Iterator[Issue]:
    if strategy.cpu_offload != "auto":
        return
    training = config.training
    if strategy.pp_size > 1:
        yield Issue(
            ("strategy.cpu_offload", "strategy.pp_size"),
            f"cpu_offload auto does not work with pp_size {strategy.pp_size}: a pipeline already "
            "gives each GPU as many layers as fit",
            "remove cpu_offload, or use pp_size: 1",
        )
    named = "stochastic_rounding true" if training.stochastic_rounding else None
    if training.optimizer != "adamw":
        named = f"optimizer {training.optimizer}"
    if named is not None:
        yield Issue(
            ("strategy.cpu_offload", f"training.{named.split()[0]}"),
            f"cpu_offload auto does not work with {named}, which steps the weights of several "
            "blocks together, and these would be on two devices",
            "use training.optimizer: adamw without stochastic_rounding, or cpu_offload: true",
        )


def _ddp(config: RunConfig, strategy: DDPStrategyConfig) -> Iterator[Issue]:
    cut = next((name for name in ("tp_size", "pp_size") if getattr(strategy, name) > 1), None)
    key, precision = "strategy.gradient_compression", "training.precision"
    if cut is not None:
        to = f"{cut} {getattr(strategy, cut)}: DistributedDataParallel then sends no gradients"
        for name in ("strategy.bucket_cap_mb", key, "strategy.static_graph"):
            yield from no_effect(strategy, name, to, f"set {cut}: 1")
    elif config.training.precision == "bf16-true":
        to = "precision bf16-true: gradients are already bf16"
        yield from no_effect(strategy, key, to, "use precision: bf16-mixed", precision)


def _deepspeed(config: RunConfig, strategy: DeepSpeedStrategyConfig) -> Iterator[Issue]:
    if strategy.config_file is None:
        # With a file, interop/deepspeed.py compares these keys, which the file may also set.
        yield from offload_issues(strategy)
        if "nvme" not in (strategy.offload_optimizer, strategy.offload_param):
            to, use = "a run without offload to nvme", "use offload_param: nvme"
            yield from no_effect(strategy, "strategy.nvme_path", to, use)
    if config.training.optimizer == "muon":
        yield Issue(
            ("training.optimizer", "strategy.kind"),
            "muon needs whole matrices, and deepspeed shards them into flat pieces",
            "use optimizer: adamw, or strategy: {kind: fsdp}",
        )
    if config.training.precision == "bf16-true":
        yield Issue(
            ("training.precision", "strategy.kind"),
            "bf16-true has no fp32 weights, and deepspeed's optimizer needs them",
            "use precision: bf16-mixed (bf16 compute, sharded fp32 weights), or strategy: "
            "{kind: fsdp}",
        )


def model_rules(config: RunConfig) -> Iterator[Issue]:
    """Every broken rule of the model and its adapter that needs only the run file."""
    name, init, shapes = config.model.name_or_path, config.model.init, shape_names()
    keys = ("model.name_or_path", "model.init")
    is_path = "/" in name or "\\" in name or name.startswith((".", "~")) or name.endswith(".json")
    near = difflib.get_close_matches(name, shapes, n=1, cutoff=0.8)
    if name in shapes and init == "pretrained":
        yield Issue(
            keys[::-1],
            f"{name} is a shape shipped with isles, which has no weights",
            "add init: scratch below model:, or name a model that has weights",
        )
    elif name not in shapes and near and init == "scratch" and not is_path:
        yield Issue(
            keys,
            f"{name} is not a shape shipped with isles ({', '.join(shapes)})",
            f"did you mean {near[0]}? For a folder of this name, write ./{name}",
        )
    adapter = config.adapter
    yield from idle_keys(config, "adapter")
    if adapter.type != "none":
        yield from _adapter(config, adapter)
    elif config.checkpoint.merge_adapter:
        yield Issue(
            ("checkpoint.merge_adapter", "adapter.type"),
            "merge_adapter is true, and the run trains no adapter",
            "delete it, as the export is a whole model anyway, or set adapter.type: lora",
        )


def _adapter(config: RunConfig, adapter: AdapterConfig) -> Iterator[Issue]:
    if config.model.init == "scratch":
        yield Issue(
            ("adapter.type", "model.init"),
            f"adapter.type {adapter.type} freezes the model, and model.init scratch would freeze "
            "random weights",
            "use model.init: pretrained, or adapter.type: none",
        )
    named = () if isinstance(adapter.target_modules, str) else adapter.target_modules
    if twice := sorted(set(adapter.modules_to_save) & set(named)):
        yield Issue(
            ("adapter.modules_to_save", "adapter.target_modules"),
            f"{twice[0]} is in both target_modules, which freezes it, and modules_to_save, which "
            "trains it",
            "keep it in one of the two lists",
        )
    if adapter.type == "qlora":
        yield from _four_bits(config)
    elif isinstance(config.strategy, MeshSection):
        yield from _cut(adapter, config.strategy)


def _four_bits(config: RunConfig) -> Iterator[Issue]:
    # Layouts that isles has not built for weights in 4 bits.
    strategy, instead = config.strategy, "use strategy: {kind: fsdp}, which shards 4-bit weights"
    if isinstance(strategy, DeepSpeedStrategyConfig):
        yield Issue(
            ("strategy.kind", "adapter.type"),
            "deepspeed with adapter.type qlora is not built: a rank quantizes its own blocks of 64 "
            "numbers, and DeepSpeed would cut a weight inside a block",
            f"{instead} like ZeRO-3, or {{kind: ddp}} if the 4-bit model fits each GPU",
        )
        return
    if (size := getattr(strategy, "tp_size", 1)) > 1:
        yield Issue(
            ("strategy.tp_size", "adapter.type"),
            f"tp_size {size} with adapter.type qlora is not built: tensor-parallel ranks need "
            "columns of a matrix, and a block of 64 numbers belongs to one row",
            f"delete tp_size and {instead}",
        )


def _cut(adapter: AdapterConfig, strategy: MeshSection) -> Iterator[Issue]:
    # Limits of adapters under tensor parallelism.
    if strategy.tp_size == 1:
        return
    reasons = {
        "dropout": "tensor-parallel ranks would drop different values of one matrix",
        "use_dora": "DoRA needs the lengths of whole rows, which no rank has",
        "modules_to_save": "the sharding plan does not support such copies",
    }
    for name, reason in reasons.items():
        if value := getattr(adapter, name):
            yield Issue(
                (f"adapter.{name}", "strategy.tp_size"),
                f"{name} {show_value(value)} does not work with tp_size {strategy.tp_size}: "
                f"{reason}",
                "delete it, or set tp_size: 1. strategy: {kind: fsdp} shards any model",
            )

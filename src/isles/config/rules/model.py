"""The rules of `model` and `adapter`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from isles.config.issues import Issue, show_value
from isles.config.sections.model import AdapterConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
    MeshSection,
)
from isles.facts.models import shape_names

_ONLY_QLORA = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def model_rules(config: RunConfig) -> Iterator[Issue]:
    """Every rule of the model and its adapter that is broken, as far as the file alone can tell."""
    yield from _shipped_shapes(config)
    yield from _without_effect(config.adapter)
    if config.adapter.type != "none":
        yield from _adapter(config, config.adapter)
    elif config.checkpoint.merge_adapter:
        yield Issue(
            ("checkpoint.merge_adapter", "adapter.type"),
            "merge_adapter is true, and the run trains no adapter",
            "delete it: the export is a whole model anyway; or set adapter.type: lora",
        )


def _shipped_shapes(config: RunConfig) -> Iterator[Issue]:
    name, init, shapes = config.model.name_or_path, config.model.init, shape_names()
    keys = ("model.name_or_path", "model.init")
    if name in shapes and init == "pretrained":
        yield Issue(
            keys[::-1],
            f"{name} is a shape shipped with isles: it has no weights to start from",
            "add init: scratch below model:, or name a model that has weights",
        )
    is_path = "/" in name or "\\" in name or name.startswith((".", "~")) or name.endswith(".json")
    near = difflib.get_close_matches(name, shapes, n=1, cutoff=0.8)
    if name not in shapes and near and init == "scratch" and not is_path:
        yield Issue(
            keys,
            f"{name} is no shape shipped with isles ({', '.join(shapes)})",
            f"did you mean {near[0]}? A folder of that name is written ./{name}",
        )


def _without_effect(adapter: AdapterConfig) -> Iterator[Issue]:
    """Keys with another value than their default, which a type does not look at."""
    for name, field in AdapterConfig.model_fields.items():
        is_ignored = adapter.type == "none" or (adapter.type == "lora" and name in _ONLY_QLORA)
        if name == "type" or not is_ignored or getattr(adapter, name) == field.default:
            continue
        yield Issue(
            (f"adapter.{name}", "adapter.type"),
            f"adapter.{name} means nothing to adapter.type {adapter.type}",
            f"delete it, or set adapter.type: {'qlora' if name in _ONLY_QLORA else 'lora'}",
        )


def _adapter(config: RunConfig, adapter: AdapterConfig) -> Iterator[Issue]:
    if config.model.init == "scratch":
        yield Issue(
            ("adapter.type", "model.init"),
            f"adapter.type {adapter.type} trains a little beside a frozen model, and model.init "
            "scratch would freeze weights that have learnt nothing",
            "use model.init: pretrained, or adapter.type: none",
        )
    named = () if isinstance(adapter.target_modules, str) else adapter.target_modules
    if twice := sorted(set(adapter.modules_to_save) & set(named)):
        yield Issue(
            ("adapter.modules_to_save", "adapter.target_modules"),
            f"{twice[0]} stands in target_modules and in modules_to_save: it cannot be frozen "
            "beside its adapter and trained whole",
            "keep it in one of them",
        )
    if adapter.type == "qlora":
        yield from _four_bits(config)
    elif isinstance(config.strategy, MeshSection):
        yield from _cut(adapter, config.strategy)


def _four_bits(config: RunConfig) -> Iterator[Issue]:
    strategy = config.strategy
    why = (
        "cuts the weights over the ranks, and those of qlora are packed in blocks of 4 bits that "
        "cannot be cut"
    )
    if isinstance(strategy, FSDPStrategyConfig | DeepSpeedStrategyConfig):
        yield Issue(
            ("strategy.kind", "adapter.type"),
            f"strategy {strategy.kind} {why}",
            "use strategy: {kind: ddp}; or adapter.type: lora, which any strategy can cut",
        )
    if isinstance(strategy, DDPStrategyConfig):
        for name in ("tp_size", "pp_size"):
            if (size := getattr(strategy, name)) > 1:
                yield Issue(
                    (f"strategy.{name}", "adapter.type"),
                    f"{name} {size} {why}",
                    f"set {name}: 1, or adapter.type: lora",
                )


def _cut(adapter: AdapterConfig, strategy: MeshSection) -> Iterator[Issue]:
    """What ranks cannot do with an adapter that hold parts of one layer, or some of the layers."""
    if strategy.pp_size > 1:
        yield Issue(
            ("strategy.pp_size", "adapter.type"),
            f"pp_size {strategy.pp_size} does not train adapters: a stage may hold nothing that is "
            "trained, and has no gradient to hand on",
            "set pp_size: 1; strategy: {kind: fsdp} cuts any model over the ranks",
        )
    if strategy.tp_size == 1:
        return
    reasons = {
        "dropout": "ranks that hold parts of one matrix would drop different values",
        "use_dora": "no rank has the whole rows whose lengths DoRA needs",
        "modules_to_save": "the plan that cuts the model does not know such copies",
    }
    for name, reason in reasons.items():
        if value := getattr(adapter, name):
            yield Issue(
                (f"adapter.{name}", "strategy.tp_size"),
                f"{name} {show_value(value)} does not go together with tp_size {strategy.tp_size}: "
                f"{reason}",
                "delete it, or set tp_size: 1; strategy: {kind: fsdp} cuts any model",
            )

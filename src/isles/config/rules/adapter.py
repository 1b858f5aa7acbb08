"""The rules between the keys of `adapter`, and between them and the rest of the run file."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.issue import Violation
from isles.config.sections.adapter import AdapterConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
    MeshSection,
)

_ONLY_QLORA = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def adapter_rules(config: RunConfig) -> Iterator[Violation]:
    """Every rule about the adapter that is broken, as far as the file alone can tell."""
    adapter = config.adapter
    yield from _without_effect(adapter)
    if adapter.type == "none":
        if config.checkpoint.merge_adapter:
            yield Violation(
                ("checkpoint.merge_adapter", "adapter.type"),
                "merge_adapter is true, and the run trains no adapter",
                "delete it: the export is a whole model anyway; or set adapter.type: lora",
            )
        return
    if config.model.init == "scratch":
        yield Violation(
            ("adapter.type", "model.init"),
            f"adapter.type {adapter.type} trains a little beside a frozen model, and model.init "
            "scratch would freeze weights that have learnt nothing",
            "use model.init: pretrained, or adapter.type: none",
        )
    twice = sorted(set(adapter.modules_to_save) & set(_named(adapter)))
    if twice:
        yield Violation(
            ("adapter.modules_to_save", "adapter.target_modules"),
            f"{twice[0]} stands in target_modules and in modules_to_save: it cannot be frozen "
            "beside its adapter and trained whole",
            "keep it in one of them",
        )
    if adapter.type == "qlora":
        yield from _four_bits(config)
    elif isinstance(config.strategy, MeshSection):
        yield from _cut(adapter, config.strategy)


def _named(adapter: AdapterConfig) -> tuple[str, ...]:
    return () if isinstance(adapter.target_modules, str) else adapter.target_modules


def _without_effect(adapter: AdapterConfig) -> Iterator[Violation]:
    """Keys with another value than their default, which a type does not look at."""
    for name, field in AdapterConfig.model_fields.items():
        value = getattr(adapter, name)
        is_ignored = adapter.type == "none" or (adapter.type == "lora" and name in _ONLY_QLORA)
        if name == "type" or not is_ignored or value == field.default:
            continue
        instead = "qlora" if name in _ONLY_QLORA else "lora"
        yield Violation(
            (f"adapter.{name}", "adapter.type"),
            f"adapter.{name} means nothing to adapter.type {adapter.type}",
            f"delete it, or set adapter.type: {instead}",
        )


def _four_bits(config: RunConfig) -> Iterator[Violation]:
    """bitsandbytes' 4 bits come in blocks that nobody may cut."""
    strategy = config.strategy
    fix = "use strategy: {kind: ddp}; or adapter.type: lora, which any strategy can cut"
    if isinstance(strategy, FSDPStrategyConfig | DeepSpeedStrategyConfig):
        yield Violation(
            ("strategy.kind", "adapter.type"),
            f"strategy {strategy.kind} cuts the weights over the ranks, and those of qlora are "
            "packed in blocks of 4 bits that cannot be cut",
            fix,
        )
    if isinstance(strategy, DDPStrategyConfig):
        for name in ("tp_size", "pp_size"):
            if getattr(strategy, name) > 1:
                yield Violation(
                    (f"strategy.{name}", "adapter.type"),
                    f"{name} {getattr(strategy, name)} cuts the weights over the ranks, and those "
                    "of qlora are packed in blocks of 4 bits that cannot be cut",
                    f"set {name}: 1, or adapter.type: lora",
                )


def _cut(adapter: AdapterConfig, strategy: MeshSection) -> Iterator[Violation]:
    """What ranks cannot do with an adapter that hold parts of one layer, or some of the layers."""
    if strategy.pp_size > 1:
        yield Violation(
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
        value = getattr(adapter, name)
        if value:
            shown = ", ".join(value) if isinstance(value, tuple) else str(value).lower()
            yield Violation(
                (f"adapter.{name}", "strategy.tp_size"),
                f"{name} {shown} does not go together with tp_size {strategy.tp_size}: {reason}",
                "delete it, or set tp_size: 1; strategy: {kind: fsdp} cuts any model",
            )

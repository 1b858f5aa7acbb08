"""The rules between the keys that say how documents become samples."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.issue import Violation
from isles.config.sections.isolation import isolates_any
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import MeshSection

_JOINED = "data.packing: false (a row for each document) or data.isolate_documents: false"


def packing_rules(config: RunConfig) -> Iterator[Violation]:
    """Every rule about packing, and about pairs of preferences, that is broken."""
    yield from _meaningless(config)
    yield from _isolation(config)
    yield from _preferences(config)


def _meaningless(config: RunConfig) -> Iterator[Violation]:
    data = config.data
    kinds = sorted({source.type for source in data.sources})
    if data.isolate_documents and not data.packing:
        yield Violation(
            ("data.isolate_documents", "data.packing"),
            "isolate_documents true means nothing to packing false: every row is one document",
            "delete it, or use packing: true",
        )
    if data.too_long == "drop" and not set(kinds) - {"text", "fake"}:
        yield Violation(
            ("data.too_long", "data.sources"),
            f"too_long drop means nothing to {' and '.join(kinds)}: long text is cut into samples",
            "delete it",
        )


def _isolation(config: RunConfig) -> Iterator[Violation]:
    strategy = config.strategy
    if not isolates_any(config.data) or not isinstance(strategy, MeshSection):
        return
    keys = ("data.isolate_documents", "data.packing", "strategy.pp_size")
    if strategy.pp_size > 1 and strategy.cp_size > 1:
        yield Violation(
            (*keys, "strategy.cp_size"),
            f"stages of a pipeline (pp_size {strategy.pp_size}) are told of documents by their "
            f"tokens' positions alone, and cp_size {strategy.cp_size} leaves each rank with a part "
            "of these",
            f"use {_JOINED}, or set cp_size: 1 or pp_size: 1",
        )
    if strategy.pp_size > 1 and config.model.attn_implementation == "flash_attention_2":
        yield Violation(
            (*keys, "model.attn_implementation"),
            "flash_attention_2 must be told where each document ends, and the stages of a pipeline "
            f"(pp_size {strategy.pp_size}) get only the positions of tokens",
            f"use attn_implementation: sdpa, {_JOINED}",
        )


def _preferences(config: RunConfig) -> Iterator[Violation]:
    """dpo compares answers in pairs, and nothing else reads pairs."""
    is_dpo = config.training.method == "dpo"
    for index, source in enumerate(config.data.sources):
        at = f"data.sources.{index}.type"
        if source.type == "preference" and not is_dpo:
            yield Violation(
                ("training.method", at, f"data.sources.{index}"),
                f"method {config.training.method} does not read a preference source",
                "use method: dpo, or a source of another type",
            )
        elif is_dpo and source.type not in ("preference", "fake"):
            yield Violation(
                (at, f"data.sources.{index}", "training.method"),
                f"dpo compares two answers to a prompt, and a {source.type} source has one",
                "use type: preference, or training.method: causal_lm",
            )

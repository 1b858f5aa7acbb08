"""Keys without effect under the value of another key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from isles.config.issues import Issue, show_value
from isles.config.sections.base import Section
from isles.config.sections.model import AdapterConfig
from isles.config.sections.run import RunConfig

_QLORA = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")

# A key, the key that it depends on, a test for the values with effect, and one such value.
_NEEDS: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("training.decay_steps", "training.lr_scheduler_type", lambda v: v == "wsd", ": wsd"),
    (
        "training.min_lr_ratio",
        "training.lr_scheduler_type",
        lambda v: v != "constant",
        ": linear, cosine or wsd",
    ),
    ("training.dpo_beta", "training.method", lambda v: v == "dpo", ": dpo"),
    ("training.dpo_label_smoothing", "training.method", lambda v: v == "dpo", ": dpo"),
    ("data.isolate_documents", "data.packing", bool, ": true"),
    (
        "strategy.shard_size",
        "strategy.sharding_strategy",
        lambda v: "HYBRID" in v,
        ": HYBRID_SHARD",
    ),
    ("strategy.cp_method", "strategy.cp_size", lambda v: v > 1, ": 2 or more"),
    ("strategy.pp_schedule", "strategy.pp_size", lambda v: v > 1, ": 2 or more"),
    ("outer.alpha", "outer.delay", bool, ": 1 or more"),
    ("outer.max_sync_overhead", "outer.sync_every", lambda v: v == "auto", ": auto"),
    ("outer.warmup_sync_every", "outer.warmup_rounds", bool, ": 1 or more"),
    ("outer.warmup_sync_every", "outer.sync_every", lambda v: v != "auto", " with a number"),
    ("outer.wait.grace", "outer.wait.quorum", bool, ": 1 or more"),
    ("outer.codec.density", "outer.codec.kind", lambda v: v == "topk", ": topk"),
    ("outer.hub", "outer.engine", lambda v: v == "hub", ": hub"),
    ("outer.public", "outer.engine", lambda v: v == "hub", ": hub"),
    ("outer.hivemind", "outer.engine", lambda v: v == "hivemind", ": hivemind"),
    ("outer.url", "outer.engine", lambda v: v == "bucket", ": bucket"),
    *((f"adapter.{key}", "adapter.type", lambda v: v == "qlora", ": qlora") for key in _QLORA),
    *(
        (f"adapter.{key}", "adapter.type", lambda v: v != "none", ": lora")
        for key in AdapterConfig.model_fields
        if key not in (*_QLORA, "type")
    ),
)


def idle_keys(config: RunConfig, *sections: str) -> Iterator[Issue]:
    """The keys of these sections without effect under the value of another key."""
    for key, other, has_meaning, instead in _NEEDS:
        parent, _, name = key.rpartition(".")
        section, value = config.at(parent), config.at(other)
        is_here = parent.partition(".")[0] in sections and hasattr(section, name)
        if is_here and not has_meaning(value):
            needed = other.rpartition(".")[2]
            to = f"{needed} {show_value(value)}"
            yield from no_effect(section, key, to, f"use {needed}{instead}", other)


def no_effect(
    section: Section, key: str, to: str, instead: str = "", *other_keys: str
) -> Iterator[Issue]:
    """The issue of a key without effect. A key with its default has no issue.

    Args:
        key: dotted.
        to: the cause with its value: `pp_size 1`.
        instead: a change that gives the key an effect, or empty if the user can only delete it.
        other_keys: other keys that can carry the issue.
    """
    name = key.rpartition(".")[2]
    if not section.is_default(name):
        what = f"{name} {show_value(getattr(section, name))} has no effect with {to}"
        fix = f"delete it, or {instead}" if instead else "delete it"
        yield Issue((key, *other_keys), what, fix)

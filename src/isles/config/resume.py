"""Which changes of a run file a resumed run may not take up silently."""

from __future__ import annotations

from dataclasses import dataclass

from isles.config.resolve import leaves
from isles.config.run import RunConfig

# What changes where, how long, or how fast a run computes, but not what it computes in a step.
_FREE_KEYS = frozenset(
    (
        "name",
        "output_dir",
        "data.cache_dir",
        "data.max_bad_fraction",  # the hash of the samples tells whether rows have come or gone
        "model.attn_implementation",
        "track",
        "training.max_steps",
        "training.num_train_epochs",
        "training.max_time",
        "training.micro_batch_size",
        "training.logging_steps",
        "training.eval_steps",
        "training.eval_samples",
        "training.torch_compile",
        "training.gradient_checkpointing",
        "balance",
    )
)
_OUTER_FREE = (
    "rendezvous",
    "public",
    "max_rate",
    "engine",
    "interface",
    "hivemind",
    "deadline",
    "dead_after",
    "wait",
    "min_clusters",
    "outlier",
)
_FREE_SECTIONS = (
    "checkpoint.",
    "clusters.",
    "strategy.",
    "track.",
    "watchdog.",
    "balance.",
    "training.micro_batch_size.",
)

# Gradients that travel in fewer bits are other gradients. By their exact values, which strategies
# that lack the key have too; so a strategy may be exchanged for any other that is as exact.
_ROUNDING = {"strategy.gradient_compression": "none", "strategy.reduce_dtype": "fp32"}


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs between two run files; None where one of them lacks the key."""

    key: str
    old: object
    new: object


def changed_mathematics(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every value that differs and that the weights depend on."""
    before, after = _ROUNDING | dict(leaves(old)), _ROUNDING | dict(leaves(new))
    return [
        Change(key, before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and not _is_free(key)
    ]


def _is_free(key: str) -> bool:
    if key in _ROUNDING:
        return False
    if key.startswith("outer.") and key.split(".")[1] in _OUTER_FREE:
        return True
    return key in _FREE_KEYS or key.startswith(_FREE_SECTIONS)

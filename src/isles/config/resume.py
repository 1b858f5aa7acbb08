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
    )
)
_FREE_SECTIONS = ("checkpoint.", "clusters.", "strategy.")


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs between two run files; None where one of them lacks the key."""

    key: str
    old: object
    new: object


def changed_mathematics(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every value that differs and that the weights depend on."""
    before, after = dict(leaves(old)), dict(leaves(new))
    return [
        Change(key, before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
        and key not in _FREE_KEYS
        and not key.startswith(_FREE_SECTIONS)
    ]

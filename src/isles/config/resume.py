"""Where two run files differ: of a run that is resumed, and of clusters of one run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isles.config.resolve import leaves
from isles.config.sections.run import RunConfig
from isles.config.sections.training import TrainingConfig, learning_rate, length_in_steps
from isles.errors import UserError
from isles.facts.units import format_duration

# What changes where, how long, or how fast a run computes, but not what it computes in a step.
_FREE_KEYS = frozenset(
    (
        "name",
        "output_dir",
        "data.cache_dir",
        "data.max_bad_fraction",  # the hash of the samples tells whether rows have come or gone
        "model.attn_implementation",
        "track",
        "training.micro_batch_size",
        "training.logging_steps",
        "training.eval_steps",
        "training.eval_samples",
        "training.torch_compile",
        "training.gradient_checkpointing",
        "balance",
    )
)
_LENGTH = ("max_steps", "num_train_epochs", "max_time")
"""Of `training`: how long the run is, see `changed_length`."""

_OUTER_FREE = (
    "hub",
    "public",
    "max_rate",
    "engine",
    "hivemind",
    "url",
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


_MAY_DIFFER = (
    re.compile(r"data\.sources\.\d+\.path"),  # the content is compared when a cluster joins
    re.compile(r"(model|tokenizer)\.name_or_path"),
    re.compile(r"tokenizer\.chat_template"),
    re.compile(r"training\.(precision|stochastic_rounding|global_batch_size)"),
    re.compile(r"strategy\..*"),
)
_MUST_TOO = (
    "name",
    "training.max_steps",
    "outer.engine",
    "outer.wait",
    "outer.min_clusters",
    "outer.dead_after",
    "outer.outlier",
)
"""Must be equal, although a resumed run may change them."""


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs between two run files; None where one of them lacks the key.

    `is_free`: no weight depends on it, and the run does not end earlier.
    """

    key: str
    old: object
    new: object
    is_free: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def changed_mathematics(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every value that differs and that the weights depend on, save the length of the run."""
    before, after = _ROUNDING | dict(leaves(old)), _ROUNDING | dict(leaves(new))
    return [
        Change(key, before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and not _is_free(key)
    ]


def unlike(theirs: RunConfig, mine: RunConfig) -> list[Change]:
    """Values of a cluster that are not as all clusters of the run must have them."""
    changes = [
        change
        for change in changed_mathematics(theirs, mine)
        if not any(pattern.fullmatch(change.key) for pattern in _MAY_DIFFER)
    ]
    both = [(key, theirs.at(key), mine.at(key)) for key in _MUST_TOO]
    return changes + [Change(*values) for values in both if values[1] != values[2]]


def changed_length(old: RunConfig, new: RunConfig, done: Mapping[str, Any]) -> list[Change]:
    """What another length means for a run that has done some steps.

    A longer one is free unless it changes the learning rate of the next step. A shorter one ends
    the run earlier than it was meant to, perhaps at once, and is never free.

    Args:
        old, new: the run files.
        done: `step`, and as far as known `elapsed_s`, `samples` and `samples_per_epoch`, as in the
            manifest of a checkpoint.

    Returns:
        The changed values of the run file first, then what follows from them.
    """
    before, after = old.training, new.training
    keys = [key for key in _LENGTH if getattr(before, key) != getattr(after, key)]
    if not (_is_timed(before) or _is_timed(after)):
        keys = [key for key in keys if key != "max_time"]  # the limit of one start
    if not keys:
        return []
    was, left = _left(before, done), _left(after, done)
    changes = [Change(f"training.{key}", _shown(before, key), _shown(after, key)) for key in keys]
    is_free = False  # as where it cannot be told: steps beside a time
    if (is_timed := _is_timed(before)) == _is_timed(after):
        if was is not None and left is not None:
            is_free = left >= was
            what = f"{'time' if is_timed else 'steps'} left after step {done['step']}"
            texts = [format_duration(x) if is_timed else f"{x:.0f}" for x in (was, left)]
            end = "" if left else ": the run ends there"
            changes.append(Change(what, texts[0], texts[1] + end))
        elif before.max_time and after.max_time:
            is_free = after.max_time >= before.max_time
    if left != 0 and (change := _rate_change(before, after, done)):
        changes.append(change)
        is_free = False
    return [replace(change, is_free=is_free) for change in changes]


def has_more_to_do(config: RunConfig, done: Mapping[str, Any]) -> bool:
    """Whether a run that has done so much would train on with this run file."""
    return (_left(config.training, done) or 0) > 0


def changed_error(path: Path, resume: str, typed: str, changes: Sequence[Change]) -> UserError:
    """The refusal to go on with values that have changed.

    `resume` is what stands after `--resume`, `typed` the command of the last start, if known.
    """
    started = f" (it was started by `{typed}`)" if typed else ""
    return UserError(
        f"{path.name} is not finished, and these values have changed since:\n"
        + change_lines(changes),
        where=str(path),
        fix=f"put them back to go on with it{started}, or `--resume no` for a new run (`name=…` "
        f"for another name), or `--resume {shlex.quote(resume)}` to go on with the new values",
        id="run.changed",
    )


def with_changes(note: str, changes: Sequence[Change]) -> str:
    """A note on a run that goes on, with its new values."""
    return f"{note}, with these new values:\n{change_lines(changes)}" if changes else note


def change_lines(changes: Sequence[Change]) -> str:
    """Changes as lines for the user."""
    return "\n".join(f"    {change}" for change in changes)


def _is_timed(training: TrainingConfig) -> bool:
    # Whether `max_time` is the length of the run.
    return training.max_steps is None and training.num_train_epochs is None


def _left(training: TrainingConfig, done: Mapping[str, Any]) -> float | None:
    # Steps, or seconds of a run whose length is a time, that are left; None: not known.
    if _is_timed(training):
        if training.max_time is None or "elapsed_s" not in done:
            return None
        return max(0.0, training.max_time - float(done["elapsed_s"]))
    steps = _length(training, done)
    return None if steps is None else max(0, steps - int(done["step"]))


def _length(training: TrainingConfig, done: Mapping[str, Any]) -> int | None:
    samples = done.get("samples_per_epoch")
    if "samples" not in done:
        return length_in_steps(training, samples)
    step, cursor = int(done["step"]), int(done["samples"])
    return length_in_steps(training, samples, step=step, cursor=cursor)


def _rate_change(
    before: TrainingConfig, after: TrainingConfig, done: Mapping[str, Any]
) -> Change | None:
    # What becomes of the learning rate of the next step; None: it stays, or is not known.
    step = int(done["step"]) + 1
    rates = []
    for training in (before, after):
        steps = _length(training, done)
        if steps is None and training.lr_scheduler_type != "constant":
            return None
        rates.append(learning_rate(training, step, steps))
    if rates[0] == rates[1]:
        return None
    return Change(f"learning rate of step {step}", f"{rates[0]:.2e}", f"{rates[1]:.2e}")


def _shown(training: TrainingConfig, key: str) -> object:
    value = getattr(training, key)
    return format_duration(value) if key == "max_time" and value is not None else value


def _is_free(key: str) -> bool:
    if key in _ROUNDING:
        return False
    if key.startswith("outer.") and key.split(".")[1] in _OUTER_FREE:
        return True
    if key.removeprefix("training.") in _LENGTH:
        return True
    return key in _FREE_KEYS or key.startswith(_FREE_SECTIONS)

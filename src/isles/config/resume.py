"""Differences of two run files: of a resumed run, and of clusters of one run."""

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

# These keys change the place, length or speed of a run, but not the result of a step.
_FREE_KEYS = frozenset(
    (
        "name",
        "output_dir",
        "data.cache_dir",
        "data.max_bad_fraction",  # the hash of the samples shows added or removed rows
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
"""Keys of `training` for the length of the run. See `changed_length`."""

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

# Gradients sent in fewer bits are different gradients. The values here are exact, and strategies
# without the key have them too, so that a run may change to any strategy that is equally exact.
_ROUNDING = {"strategy.gradient_compression": "none", "strategy.reduce_dtype": "fp32"}


_MAY_DIFFER = (
    re.compile(r"data\.sources\.\d+\.path"),  # isles compares the content when a cluster joins
    re.compile(r"(model|tokenizer)\.name_or_path"),
    re.compile(r"tokenizer\.chat_template"),
    re.compile(r"training\.(precision|tf32|stochastic_rounding|global_batch_size)"),
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
    """One value that differs between two run files, or None if a file lacks the key.

    `is_free`: no weight depends on the value, and the run does not end earlier.
    """

    key: str
    old: object
    new: object
    is_free: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def changed_mathematics(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every changed value that affects the weights, except for the length of the run."""
    before, after = _ROUNDING | dict(leaves(old)), _ROUNDING | dict(leaves(new))
    return [
        Change(key, before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and not _is_free(key)
    ]


def unlike(theirs: RunConfig, mine: RunConfig) -> list[Change]:
    """Values of a cluster that must be equal in all clusters, and differ."""
    changes = [
        change
        for change in changed_mathematics(theirs, mine)
        if not any(pattern.fullmatch(change.key) for pattern in _MAY_DIFFER)
    ]
    both = [(key, theirs.at(key), mine.at(key)) for key in _MUST_TOO]
    return changes + [Change(*values) for values in both if values[1] != values[2]]


def changed_length(old: RunConfig, new: RunConfig, done: Mapping[str, Any]) -> list[Change]:
    """Effects of another length on a run that has done some steps.

    A longer length is free unless it changes the learning rate of the next step. A shorter length
    ends the run earlier, perhaps immediately, and is never free.

    Args:
        old, new: the run files.
        done: `step`, and if known `elapsed_s`, `samples` and `samples_per_epoch`, as in the
            manifest of a checkpoint.

    Returns:
        The changed values of the run file first, then their effects.
    """
    before, after = old.training, new.training
    keys = [key for key in _LENGTH if getattr(before, key) != getattr(after, key)]
    if not (_is_timed(before) or _is_timed(after)):
        keys = [key for key in keys if key != "max_time"]  # the limit of one attempt
    if not keys:
        return []
    was, left = _left(before, done), _left(after, done)
    changes = [Change(f"training.{key}", _shown(before, key), _shown(after, key)) for key in keys]
    is_free = False  # also if unknown, as for steps against a time
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
    """True if a run with this progress would continue to train under this run file."""
    return (_left(config.training, done) or 0) > 0


def changed_error(path: Path, resume: str, typed: str, changes: Sequence[Change]) -> UserError:
    """The error for a resumed run with changed values.

    `resume` is the value of `--resume`, `typed` the command of the last attempt, if known.
    """
    started = f" (last started with `{typed}`)" if typed else ""
    return UserError(
        f"{path.name} is not finished, and these values have changed since:\n"
        + change_lines(changes),
        where=str(path),
        fix=f"restore the old values to resume the run{started}, or use `--resume no` for a new "
        f"run (`name=…` for another name), or `--resume {shlex.quote(resume)}` to resume with the "
        "new values",
        id="run.changed",
    )


def with_changes(note: str, changes: Sequence[Change]) -> str:
    """A note on a resumed run, with its new values."""
    return f"{note}, with these new values:\n{change_lines(changes)}" if changes else note


def change_lines(changes: Sequence[Change]) -> str:
    """Changes as lines for the user."""
    return "\n".join(f"    {change}" for change in changes)


def _is_timed(training: TrainingConfig) -> bool:
    # Whether `max_time` is the length of the run.
    return training.max_steps is None and training.num_train_epochs is None


def _left(training: TrainingConfig, done: Mapping[str, Any]) -> float | None:
    # Remaining steps, or seconds if the length is a time, or None if unknown.
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
    # The change of the next step's learning rate, or None if it is unchanged or unknown.
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

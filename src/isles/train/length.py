"""The length of a run: checked against the data at the start, and judged by the loss at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from isles.config.length import length_notes
from isles.config.resolve import Resolved
from isles.config.rules.training import schedule_rules
from isles.config.sections.run import RunConfig
from isles.config.sections.training import Epochs, length_in_steps, warmup_in_steps
from isles.data.mix import Dataset
from isles.errors import ConfigError, ConfigErrors
from isles.run.checkpoints import CheckpointInfo

log = logging.getLogger(__name__)

_LEAST_FALL = 0.01
"""isles warns at the end of a run if the loss fell by less than this share."""


def run_length(
    resolved: Resolved,
    data: Dataset,
    resume_from: CheckpointInfo | None,
    note: Callable[[str], None],
) -> tuple[int | None, Epochs | None]:
    """The length of a run in steps, and its epochs; None if the length is a time or in steps.

    Args:
        resolved: the run.
        data: its training data.
        resume_from: the checkpoint that the run resumes from.
        note: called with each warning about an unusual length.

    Raises:
        ConfigErrors: the warm-up or the decay is longer than the run.
    """
    training, origins = resolved.config.training, resolved.origins
    samples_per_epoch = data.samples_per_epoch
    epochs = Epochs.of(training, samples_per_epoch)
    done = {"step": 0, "samples": 0} if resume_from is None else resume_from.manifest
    step, cursor = int(done["step"]), int(done["samples"])
    steps = length_in_steps(training, samples_per_epoch, step=step, cursor=cursor)
    if issues := [*schedule_rules(training, steps)]:
        places = (f"{origins[issue.keys[0]]} {issue.keys[0]}" for issue in issues)
        raise ConfigErrors(
            [
                ConfigError(issue.what, where=place, fix=issue.fix)
                for issue, place in zip(issues, places, strict=True)
            ]
        )
    if steps is None:
        return None, None
    warmup = warmup_in_steps(training, steps)
    log.info("length steps=%d warmup=%d samples_per_epoch=%d", steps, warmup, samples_per_epoch)
    for issue in length_notes(training, steps, samples_per_epoch):
        note(f"{issue.what}: {issue.fix}")
    return steps, epochs


def unmoved(
    config: RunConfig, losses: Sequence[tuple[int, Any, Any]], evals: Sequence[tuple[int, Any, Any]]
) -> str:
    """A note if neither loss of a whole run fell by `_LEAST_FALL`; otherwise empty.

    The training loss is compared by the means of its first and last tenth, the validation loss by
    its first and last value. Either loss alone would mislead: a run may learn most before its first
    validation, its validation loss may rise again, and its training loss may be noisy.

    Args:
        config: the run file.
        losses, evals: step, loss and a third value of each recorded step and evaluation.
    """
    if all(source.type == "fake" for source in config.data.sources):
        return ""  # random tokens cannot be learned
    text = ""
    for name, points in (("training", losses), ("validation", evals)):
        found = [(step, loss) for step, loss, _ in points if isinstance(loss, float)]
        if len(found) < 2 or found[0][0] == found[-1][0]:
            continue
        count = 1 if name == "validation" else max(1, len(found) // 10)
        first = sum(loss for _, loss in found[:count]) / count
        last = sum(loss for _, loss in found[-count:]) / count
        if last < first * (1 - _LEAST_FALL):
            return ""
        verb = "rose" if last > first * (1 + _LEAST_FALL) else f"did not move by {_LEAST_FALL:.0%}"
        text = (
            f"the {name} loss {verb}: {first:.4f} at step {found[0][0]}, {last:.4f} at step "
            f"{found[-1][0]}"
        )
    return text and (
        f"{text}. The model has learned little or nothing. Train for more steps (a larger "
        "training.num_train_epochs or max_steps, or a smaller training.global_batch_size), or "
        "change "
        f"training.learning_rate ({config.training.learning_rate:g})"
    )

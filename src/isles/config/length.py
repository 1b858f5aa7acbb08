"""The length of a run: guessed by the files of its data, and notes about a length that is odd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from isles.config.endings import ending_of
from isles.config.files import BUILT_IN, named_files
from isles.config.issues import Issue
from isles.config.rules.training import schedule_rules
from isles.config.sections.run import RunConfig
from isles.config.sections.training import TrainingConfig, length_in_steps
from isles.errors import DataError

_BYTES_PER_TOKEN = 4
_COUNTED_BYTES = 2**28
"""isles counts the rows of files up to this size. That takes a second."""

_FEW_STEPS = 20
"""A run whose epochs have fewer steps gets a note."""

_MANY_PASSES = 40
"""A run of `max_steps` that reads its data more often gets a note. A model learns next to nothing
from further passes over a text. Source: Muennighoff et al. 2023 (arXiv:2305.16264)."""


def length_notes(training: TrainingConfig, steps: int, samples: int) -> Iterator[Issue]:
    """Notes for the user about a run of few steps, or of very many passes over its data.

    Args:
        training: the run file's section.
        steps: the length of the run.
        samples: training samples of one pass over the data.
    """
    rows, data = training.global_batch_size, f"{samples} sample{'s' * (samples > 1)}"
    if training.max_steps is None:
        if steps < _FEW_STEPS:
            yield Issue(
                ("training.num_train_epochs", "training.global_batch_size"),
                f"the run has {steps} step{'s' * (steps > 1)}: num_train_epochs "
                f"{training.num_train_epochs:g} of {data}, global_batch_size {rows}. A model "
                f"seldom learns in fewer than {_FEW_STEPS} steps",
                "lower training.global_batch_size, or raise training.num_train_epochs",
            )
        return
    passes = steps * rows / samples
    if passes > _MANY_PASSES:
        yield Issue(
            ("training.max_steps", "training.global_batch_size"),
            f"the run reads its data {passes:.0f} times: {steps} steps of global_batch_size {rows} "
            f"over {data}. A model learns little from text that it has read more than "
            f"{_MANY_PASSES} times",
            "lower training.max_steps or training.global_batch_size, set "
            "training.num_train_epochs instead of max_steps, or add data",
        )


@dataclass(frozen=True, slots=True)
class Data:
    """Known properties of the data before preparation.

    Args:
        tokens: tokens of all sources, or None if unknown.
        samples: training samples of one pass over the data, or None if unknown.
        steps: length of the run, or None if unknown or a time.
        is_guess: whether `steps` follows from the sizes of files.
    """

    tokens: float | None
    samples: int | None
    steps: int | None
    is_guess: bool


def data_of(config: RunConfig) -> Data:
    """Guess the tokens and the length of a run by the files of its data on this machine."""
    tokens, samples = None, None
    with suppress(OSError, DataError):  # which the run and `isles check` report
        tokens = _tokens(config)
        if not config.data.packing:
            samples = _num_rows(config)
        elif tokens is not None:
            samples = int(tokens / config.data.seq_length)
    if samples is not None:
        samples = max(1, round(samples * (1 - config.data.validation_fraction)))
    steps = length_in_steps(config.training, samples)
    return Data(tokens, samples, steps, config.training.max_steps is None)


def guessed_issues(config: RunConfig, data: Data) -> list[Issue]:
    """Errors or notes about the length of a run, if the guess of its data is right."""
    if data.steps is None or data.samples is None:
        return []
    issues = list(schedule_rules(config.training, data.steps)) if data.is_guess else []
    return issues or list(length_notes(config.training, data.steps, data.samples))


def _tokens(config: RunConfig) -> float | None:
    total = 0.0
    for source in config.data.sources:
        if source.path is None or source.path in BUILT_IN:
            return None
        files = named_files(source.path)
        endings = [ending_of(file.name) for file in files]
        if not files or any(e.packing or e.format in (None, "parquet", "arrow") for e in endings):
            return None
        total += sum(file.stat().st_size for file in files) / _BYTES_PER_TOKEN
    return total


def _num_rows(config: RunConfig) -> int | None:
    # Each row is a sample if samples are not packed; None: the files would have to be parsed.
    total = 0
    for source in config.data.sources:
        files = [] if source.path is None else named_files(source.path)
        endings = [ending_of(file.name) for file in files]
        if not files or any(e.packing or e.format != "lines" for e in endings):
            return None
        if sum(file.stat().st_size for file in files) > _COUNTED_BYTES:
            return None
        for file in files:
            with file.open("rb") as lines:
                total += sum(line.strip() != b"" for line in lines)
    return total

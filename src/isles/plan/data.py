"""Tokens and steps of a run, guessed by the files of its data before they are prepared."""

from __future__ import annotations

from dataclasses import dataclass

from isles.config.endings import ending_of
from isles.config.files import BUILT_IN, named_files
from isles.config.sections.run import RunConfig
from isles.config.sections.training import length_in_steps

_BYTES_PER_TOKEN = 4
_COUNTED_BYTES = 2**28
"""isles counts the rows of files up to this size. That takes a second."""


@dataclass(frozen=True, slots=True)
class Data:
    """What is known of the data before it is prepared.

    Args:
        tokens: of all sources; None: not known.
        steps: length of the run; None: not known, or a time.
        is_guess: whether `steps` follows from the sizes of files.
    """

    tokens: float | None
    steps: int | None
    is_guess: bool


def data_of(config: RunConfig) -> Data:
    """Guess the tokens and the length of a run by the files of its data on this machine."""
    tokens = _tokens(config)
    if not config.data.packing:
        samples = _num_rows(config)
    else:
        samples = None if tokens is None else max(1, int(tokens / config.data.seq_length))
    steps = length_in_steps(config.training, samples)
    return Data(tokens, steps, config.training.max_steps is None)


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

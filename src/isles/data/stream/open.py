"""A source of the run file as a stream, and the part of it that is held out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from isles.config.sections.data import DataConfig
from isles.data.cut import cut_samples
from isles.data.sources.rows import Columns, Row, Rows
from isles.data.stream import segment as stream_segment
from isles.data.stream.rows import row_stream
from isles.data.stream.segment import HoldOut, Stream
from isles.data.tokens.encode import Encoder
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT_CHARS = 2**22
"""So much is held out for evaluation at most, about: a million tokens."""

_LOOKED_AT_CHARS = 2**28
"""Held-out rows are looked for in the first so many characters of a source, about."""


def open_stream(
    data: DataConfig,
    number: int,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    segment_tokens: int | None = None,
) -> Stream:
    """A source as an endless stream.

    Args:
        data: the run file's section.
        number: the source's, from 0.
        tokenizer: of the run.
        seed: of what is held out.
        segment_tokens: about so many make a segment; None: SEGMENT_TOKENS.

    Raises:
        DataError: there is no such source, or the tokenizer does not go with it.
    """
    source = data.sources[number]
    encoder = Encoder(source, tokenizer)
    return Stream(
        rows=row_stream(source, encoder.columns),
        encoder=encoder,
        max_bad_fraction=data.max_bad_fraction,
        hold_out=HoldOut(data.validation_fraction, seed, number),
        make_samples=partial(cut_samples, data, source),
        seq_length=data.seq_length,
        is_cut=source.type == "text" and data.packing,
        segment_tokens=segment_tokens or stream_segment.SEGMENT_TOKENS,
    )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The first of the held-out rows of a stream, as a source that is prepared once.

    Args:
        stream: the whole.
        fraction: share of its rows that is held out.
    """

    stream: Stream
    fraction: float

    def describe(self) -> str:
        """The stream's name."""
        return f"{self.stream.rows.describe()} (held out)"

    def identity(self) -> dict[str, Any]:
        """The stream's, and what is held out of it."""
        held_out = [self.stream.hold_out.identity, HELD_OUT_CHARS, _LOOKED_AT_CHARS]
        return {"held_out": held_out, "rows": self.stream.rows.identity()}

    def rows(self, columns: Columns) -> Rows:
        """The held-out rows among the first of the stream.

        Raises:
            DataError: there are none, or something cannot be read.
        """
        del columns  # those that the stream was opened with
        number = held = looked_at = 0
        for chunk in self.stream.rows.chunks(None):
            chosen = self.stream.hold_out(number, len(chunk.rows))
            for row, is_held in zip(chunk.rows, chosen, strict=True):
                size = _size(row)
                looked_at += size
                if is_held:
                    held += size
                    yield row
            number += len(chunk.rows)
            if held >= HELD_OUT_CHARS or looked_at >= _LOOKED_AT_CHARS:
                break
        if not held:
            raise DataError(
                f"none of the first {number} rows is held out: a share of {self.fraction:g} of a "
                "stream falls on rows at random",
                where=f"{self.stream.rows.describe()}: data.validation_fraction",
                fix="raise it; or use 0, and no evaluation; or data.streaming: false",
            )


def _size(row: Row | DataError) -> int:
    """About how many characters a row has; 1 at least."""
    if isinstance(row, DataError):
        return 1
    values = row.columns.values()
    return 1 + sum(len(v) if isinstance(v, str) else len(str(v)) for v in values)

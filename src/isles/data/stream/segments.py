"""Segments: the pieces of an endless stream that are prepared one after another.

A stream has the documents of one source in order, without held-out documents, and starts again
after the last document. Each segment is a separate folder of prepared tokens with one table of
samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isles.config.sections.data import DataConfig, SourceConfig, isolates
from isles.data.builders import Ranges, make_table
from isles.data.order import Int64Array, draw, key_from
from isles.data.samples import SampleTable
from isles.data.sources.find import open_source
from isles.data.sources.names import log_unread
from isles.data.sources.rows import Chunk, ChunkStart, Parser, Source, Tally, size_of
from isles.data.tokens.encode import Encoder, encode_each
from isles.data.tokens.store import TokenStore, TokenWriter
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEGMENT_TOKENS = 2**24
"""Approximate tokens of a segment: 32 or 64 MB on disk. Samples are shuffled within a segment.

The end of the source ends a segment, unless it would have less than a sixteenth of these tokens.
"""

HELD_OUT_CHARS = 2**22
"""Approximate largest number of tokens held out for evaluation."""

_LOOKED_AT_CHARS = 2**28
"""Approximate number of first characters of a source that held-out rows come from."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The position in a stream at which a segment starts.

    Args:
        epoch: number of earlier complete passes over the source.
        chunk_start: the chunk of the position; None: the first chunk.
        number: rows of the source before that chunk.
        skip: rows of that chunk before the position.
        tokens: tokens of its first document that the previous segment has used.
    """

    epoch: int = 0
    chunk_start: ChunkStart | None = None
    number: int = 0
    skip: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """The data needed to make a segment again exactly, without earlier segments.

    Samples are counted within the stream.
    """

    number: int
    first_sample: int
    num_samples: int
    begin: StreamPosition
    end: StreamPosition
    digest: str

    @property
    def end_sample(self) -> int:
        """Number of the sample after its last."""
        return self.first_sample + self.num_samples

    def record(self) -> dict[str, Any]:
        """Plain JSON of the segment."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> SegmentRecord:
        """The inverse of `record`."""
        places = {name: StreamPosition(**record[name]) for name in ("begin", "end")}
        return cls(**(record | places))


class HoldOut:
    """The choice of held-out documents, by their numbers only."""

    def __init__(self, fraction: float, seed: int, source: int) -> None:
        self.identity = [fraction, seed, source]
        self._fraction = fraction
        self._key = key_from(seed, 6, source)

    def __call__(self, first: int, count: int) -> list[bool]:
        """True if each of `count` documents is held out, from number `first` on."""
        drawn = draw(self._key, np.arange(first, first + count, dtype=np.int64))
        held: list[bool] = (drawn.astype(np.float64) < self._fraction * 2.0**64).tolist()
        return held


class Stream:
    """One source as an endless stream, and how it is cut into segments.

    DataError: there is no such source, or the tokenizer does not go with it.
    """

    def __init__(
        self, data: DataConfig, number: int, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        config = data.sources[number]
        self.data = data
        self.config = config
        self.encoder = Encoder(config, tokenizer)
        self.source = open_source(config, streams=True)
        self.hold_out = HoldOut(data.validation_fraction, seed, number)
        # Text is cut as if it were one document: a segment begins within the document in which the
        # one before it ended.
        self.is_cut = config.type == "text" and data.packing
        self.segment_tokens = SEGMENT_TOKENS

    def identity(self) -> dict[str, Any]:
        """Everything that the segments depend on, equal on all machines with these rows. JSON."""
        data = self.data
        return {
            "rows": self.source.content(),
            "encoder": self.encoder.identity(),
            "seq_length": data.seq_length,
            "packing": [data.packing, isolates(data, self.config), data.too_long],
            "held_out": self.hold_out.identity,
            "segment_tokens": self.segment_tokens,
        }

    def chunks(self, begin: StreamPosition) -> Iterator[tuple[Chunk, StreamPosition]]:
        """Chunks from a position on, epoch after epoch, and where each is.

        DataError: the source cannot be read, or holds no rows.
        """
        epoch, chunk_start, number, skip = begin.epoch, begin.chunk_start, begin.number, begin.skip
        while True:
            is_empty = chunk_start is None
            for chunk in self.source.chunks(self.encoder.parser, chunk_start):
                is_empty = False
                yield chunk, StreamPosition(epoch, chunk.begin, number, skip)
                number, skip = number + len(chunk.rows), 0
            if is_empty:
                raise self.nothing_to_train()
            epoch, chunk_start, number, skip = epoch + 1, None, 0, 0

    def nothing_to_train(self) -> DataError:
        """The error for a source that holds nothing."""
        return DataError(
            "has no document to train on",
            where=self.source.name,
            fix="add documents to it, or remove it from the run",
            id="data.untrained",
        )


def segment_table(
    data: DataConfig, source: SourceConfig, store: TokenStore, begin: StreamPosition
) -> SampleTable:
    """The samples of a segment that begins there."""
    ranges = Ranges.of(store)
    ranges.starts[0] = begin.tokens
    return make_table(data, source, store, ranges)


def make_segment(
    stream: Stream,
    before: SegmentRecord | None,
    folder: Path,
    tick: Callable[[int, int], None] = lambda documents, tokens: None,
) -> SegmentRecord:
    """Prepare the segment after this one, or the first, into a folder that is made here.

    `tick` is called often, with the documents and tokens so far. DataError: a row cannot be read,
    nothing in the source is trained on, or the disk is full.
    """
    begin = before.end if before else StreamPosition()
    origins, end = _write(stream, begin, folder, tick)
    store = TokenStore.open(folder)
    table = segment_table(stream.data, stream.config, store, begin)
    length = stream.data.seq_length
    if table.num_samples == 0:
        counts = table.counts
        raise DataError(
            f"none of {counts.documents} consecutive documents can be trained on: "
            f"{counts.too_long} are longer than data.seq_length {length}, and "
            f"{counts.untrained} have no trained token within that length",
            where=stream.source.name,
            fix="raise data.seq_length, or inspect the data with `isles data show`",
            id="data.untrained",
        )
    if stream.is_cut:
        used = begin.tokens + table.num_samples * length
        end = _position_of(used, np.asarray(store.document_ends), origins)
    return SegmentRecord(
        number=before.number + 1 if before else 0,
        first_sample=before.end_sample if before else 0,
        num_samples=table.num_samples,
        begin=begin,
        end=end,
        digest=store.digest,
    )


@dataclass(frozen=True, slots=True)
class _Origin:
    first: int  # number of the first document within the segment
    chunk: StreamPosition
    rows: list[int]  # for each document, its row within the chunk


def _write(
    stream: Stream, begin: StreamPosition, folder: Path, tick: Callable[[int, int], None]
) -> tuple[list[_Origin], StreamPosition]:
    # Write documents from `begin` on until there are enough; returns their positions, and the
    # position after them.
    tally = Tally(stream.source.name, stream.data.max_bad_fraction)
    size = max(stream.segment_tokens, 16 * stream.data.seq_length)
    origins: list[_Origin] = []
    end = begin
    with TokenWriter(folder, stream.encoder) as writer:
        for chunk, at in stream.chunks(begin):
            if writer.num_documents == 0 and at.epoch > begin.epoch + 1:
                tally.judge()  # if every row is bad, report that
                raise stream.nothing_to_train()
            if at.epoch > end.epoch and writer.num_tokens - begin.tokens > size // 16:
                break  # for small data, not many epochs per segment
            held_out = stream.hold_out(at.number, len(chunk.rows))
            kept = [i for i in range(at.skip, len(chunk.rows)) if not held_out[i]]
            encoded = encode_each([chunk.rows[i] for i in kept], stream.encoder, tally)
            tally.judge(is_all=False)
            taken, missing = 0, begin.tokens + size - writer.num_tokens
            while taken < len(encoded) and (missing > 0 or not taken):
                missing -= sum(len(document.ids) for document in encoded[taken])
                taken += 1
            documents = [document for row in encoded[:taken] for document in row]
            rows = [i for i, row in zip(kept, encoded[:taken], strict=False) for _ in row]
            if documents:
                origins.append(_Origin(writer.num_documents, at, rows))
                writer.append(documents)
            tick(writer.num_documents, writer.num_tokens)
            if taken < len(kept):
                end = replace(at, skip=kept[taken])
            else:
                end = StreamPosition(at.epoch, chunk.end, at.number + len(chunk.rows))
            if writer.num_tokens - begin.tokens >= size:
                break
        tally.judge()
        if begin == StreamPosition():
            log_unread(stream.source.name, tally.record())
        writer.finish(stream.source.name, {}, tally.record())
    return origins, end


def _position_of(token: int, document_ends: Int64Array, origins: list[_Origin]) -> StreamPosition:
    document = int(np.searchsorted(document_ends, token, side="right"))
    origin = origins[bisect_right(origins, document, key=lambda o: o.first) - 1]
    start = int(document_ends[document - 1]) if document else 0
    row = origin.rows[document - origin.first]
    return replace(origin.chunk, skip=row, tokens=token - start)


class HeldOut(Source):
    """The first of the held-out rows of a stream, as a source that is prepared once."""

    def __init__(self, stream: Stream) -> None:
        self.name = f"{stream.source.name} (held out)"
        self._stream = stream

    def identity(self) -> dict[str, Any]:
        held_out = [self._stream.hold_out.identity, HELD_OUT_CHARS, _LOOKED_AT_CHARS]
        return {"held_out": held_out, "rows": self._stream.source.content()}

    def chunks(self, parser: Parser, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        assert begin is None
        number = held_chars = looked_at = 0
        for chunk in self._stream.source.chunks(parser):
            is_held = self._stream.hold_out(number, len(chunk.rows))
            sizes = [size_of(row) for row in chunk.rows]
            held = [row for row, chosen in zip(chunk.rows, is_held, strict=True) if chosen]
            held_chars += sum(size for size, chosen in zip(sizes, is_held, strict=True) if chosen)
            looked_at += sum(sizes)
            number += len(chunk.rows)
            yield chunk._replace(rows=held)
            if held_chars >= HELD_OUT_CHARS or looked_at >= _LOOKED_AT_CHARS:
                break
        if not held_chars:
            fraction = self._stream.data.validation_fraction
            raise DataError(
                f"none of the first {number} rows is held out: the share {fraction:g} of a stream "
                "selects rows at random",
                where=f"{self._stream.source.name}: data.validation_fraction",
                fix="raise it, set it to 0 to skip evaluation, or set data.streaming: false",
            )

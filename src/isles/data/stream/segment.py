"""Segments: the pieces of an endless stream that are prepared one after another.

A stream is the documents of one source in their order, and again from the first after the last,
without those that are held out. Each segment is a folder of prepared tokens of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from isles.data.rng import Int64Array, draw, key_from
from isles.data.samples import SampleSource
from isles.data.sources.rows import Tally
from isles.data.stream.rows import Chunk, ChunkStart, RowStream
from isles.data.tokens.encode import Encoded, Encoder, encode_each
from isles.data.tokens.progress import Reporter
from isles.data.tokens.split import Ranges
from isles.data.tokens.store import TokenStore
from isles.data.tokens.writer import TokenWriter
from isles.errors import DataError

SEGMENT_TOKENS = 2**24
"""A segment holds about so many tokens: 32 or 64 MB on disk, and as far as samples are shuffled.

One that reaches the end of its source ends there, unless it were less than a sixteenth of that.
"""

MakeSamples = Callable[[TokenStore, Ranges], SampleSource]
"""Makes samples of parts of a segment's tokens."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where in a stream a segment begins.

    Args:
        epoch: how often the source was read to its end before.
        chunk_start: the chunk in which it begins; None: the first.
        number: rows of the source before that chunk.
        skip: rows of that chunk before it.
        tokens: tokens of its first document that the segment before has used.
    """

    epoch: int = 0
    chunk_start: ChunkStart | None = None
    number: int = 0
    skip: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What must be known of a segment to make it again, exactly, without those before it.

    Args:
        number: from 0.
        first_sample: number of its first sample within the stream.
        num_samples: how many it has.
        begin, end: its place in the stream.
        digest: of its tokens.
    """

    number: int
    first_sample: int
    num_samples: int
    begin: Position
    end: Position
    digest: str

    def record(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> SegmentRecord:
        """What `record` gave.

        Raises:
            KeyError, TypeError: it is not one.
        """
        places = {name: Position(**record[name]) for name in ("begin", "end")}
        return cls(**(record | places))


class HoldOut:
    """Which documents are held out for validation: by their number alone.

    Args:
        fraction: share of them.
        seed: another seed holds out others.
        source: number of the source in the run file.
    """

    def __init__(self, fraction: float, seed: int, source: int) -> None:
        self.identity = [fraction, seed, source]
        self._fraction = fraction
        self._key = key_from(seed, 6, source)

    def __call__(self, first: int, count: int) -> list[bool]:
        """Whether each of so many documents is, from this number on."""
        lots = draw(self._key, np.arange(first, first + count, dtype=np.int64))
        held: list[bool] = (lots.astype(np.float64) < self._fraction * 2.0**64).tolist()
        return held


@dataclass(frozen=True, slots=True)
class Stream:
    """One source as an endless stream, and how it is cut into segments.

    Args:
        rows: of the source.
        encoder: makes documents of them.
        max_bad_fraction: share of a segment's rows that may be left out because they are bad.
        hold_out: which of them are left out.
        make_samples: makes samples of a segment's tokens.
        seq_length: places in a sample.
        is_cut: whether samples are cut out of the documents as if they were one text; then a
            segment begins within the document in which the one before it ended.
        segment_tokens: about so many make a segment.
    """

    rows: RowStream
    encoder: Encoder
    max_bad_fraction: float
    hold_out: HoldOut
    make_samples: MakeSamples
    seq_length: int
    is_cut: bool
    segment_tokens: int


def samples_of(make_samples: MakeSamples, store: TokenStore, begin: Position) -> SampleSource:
    """The samples of a segment that begins there."""
    ends = np.asarray(store.document_ends)
    starts = np.concatenate([[begin.tokens], ends[:-1]])
    return make_samples(store, Ranges(starts, ends))


def make_segment(
    stream: Stream, before: SegmentRecord | None, folder: Path, reporter: Reporter
) -> SegmentRecord:
    """Prepare the segment after this one into a folder that is made here.

    Raises:
        DataError: a row cannot be read, nothing in the source is trained on, or the disk is full.
    """
    begin = before.end if before else Position()
    origins, end = _write(stream, begin, folder, reporter)
    store = TokenStore.open(folder)
    samples = samples_of(stream.make_samples, store, begin)
    num_samples = samples.num_samples
    if num_samples == 0:
        counts = samples.counts
        raise DataError(
            f"none of {counts.documents} documents that follow one another can be trained on: "
            f"{counts.too_long} are longer than data.seq_length {stream.seq_length}, and of "
            f"{counts.untrained} nothing within that length is trained",
            where=stream.rows.describe(),
            fix="raise data.seq_length, or look at the data with `isles data show`",
            id="data.untrained",
        )
    if stream.is_cut:
        used = begin.tokens + num_samples * stream.seq_length
        end = _position_of(used, np.asarray(store.document_ends), origins)
    return SegmentRecord(
        number=before.number + 1 if before else 0,
        first_sample=before.first_sample + before.num_samples if before else 0,
        num_samples=num_samples,
        begin=begin,
        end=end,
        digest=store.digest,
    )


def nothing_to_train(name: str) -> DataError:
    """The error for a source without a document that is trained on."""
    return DataError(
        "holds no document to train on",
        where=name,
        fix="give it more, or take it out of the run",
        id="data.untrained",
    )


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where some documents that follow one another came from.

    Args:
        first: number of the first of them within the segment.
        chunk: where their chunk is.
        rows: for each, its row within that chunk.
    """

    first: int
    chunk: Position
    rows: list[int]


def _write(
    stream: Stream, begin: Position, folder: Path, reporter: Reporter
) -> tuple[list[_Origin], Position]:
    """Write documents from `begin` on until there are enough; the place after them as well."""
    writer = TokenWriter(folder, stream.encoder)
    tally = Tally(stream.rows.describe(), stream.max_bad_fraction)
    size = max(stream.segment_tokens, 16 * stream.seq_length)
    origins: list[_Origin] = []
    end = begin
    with writer:
        for chunk, at in _chunks(stream.rows, begin):
            if writer.num_documents == 0 and at.epoch > begin.epoch + 1:
                tally.judge()  # where every row is bad, that is why
                raise nothing_to_train(stream.rows.describe())
            if at.epoch > end.epoch and writer.num_tokens - begin.tokens > size // 16:
                break  # small data: not many epochs at once
            held_out = stream.hold_out(at.number, len(chunk.rows))
            kept = [i for i in range(at.skip, len(chunk.rows)) if not held_out[i]]
            encoded = encode_each([chunk.rows[i] for i in kept], stream.encoder, tally)
            taken = _fill(encoded, begin.tokens + size - writer.num_tokens)
            documents = [document for row in encoded[:taken] for document in row]
            rows = [i for i, row in zip(kept, encoded[:taken], strict=False) for _ in row]
            if documents:
                origins.append(_Origin(writer.num_documents, at, rows))
                writer.append(documents)
            reporter.tick(writer.num_documents, writer.num_tokens)
            if taken < len(kept):
                end = replace(at, skip=kept[taken])
            else:
                end = Position(at.epoch, chunk.end, at.number + len(chunk.rows))
            if writer.num_tokens - begin.tokens >= size:
                break
        tally.judge()
        writer.finish(stream.rows.describe(), {}, tally.record())
    return origins, end


def _fill(encoded: list[list[Encoded]], wanted: int) -> int:
    """How many rows it takes for so many tokens; all, if they are fewer."""
    for number, documents in enumerate(encoded, start=1):
        wanted -= sum(len(document.ids) for document in documents)
        if wanted <= 0:
            return number
    return len(encoded)


def _chunks(rows: RowStream, begin: Position) -> Iterator[tuple[Chunk, Position]]:
    """Chunks from a position on, epoch after epoch, and where each is."""
    epoch, chunk_start, number, skip = begin.epoch, begin.chunk_start, begin.number, begin.skip
    while True:
        empty = chunk_start is None
        for chunk in rows.chunks(chunk_start):
            empty = False
            yield chunk, Position(epoch, chunk.begin, number, skip)
            number, skip = number + len(chunk.rows), 0
        if empty:
            raise nothing_to_train(rows.describe())
        epoch, chunk_start, number, skip = epoch + 1, None, 0, 0


def _position_of(token: int, document_ends: Int64Array, origins: list[_Origin]) -> Position:
    """The position of one token of a segment."""
    document = int(np.searchsorted(document_ends, token, side="right"))
    origin = origins[bisect_right(origins, document, key=lambda o: o.first) - 1]
    start = int(document_ends[document - 1]) if document else 0
    row = origin.rows[document - origin.first]
    return replace(origin.chunk, skip=row, tokens=token - start)

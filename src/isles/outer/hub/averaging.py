"""The average of a turn, piece by piece: memory for a few pieces, whatever the model's size."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from isles.outer.hub.files import chunk_list
from isles.outer.messages import CHUNK_BYTES, digest_of


class Averager(Protocol):
    """What the rendezvous must know of codecs; `isles.outer.average` is one.

    A codec is a word; pieces are numbers of elements.
    """

    def size(self, codec: str, n: int) -> int:
        """Bytes of a piece as a cluster sends it."""
        ...

    def inspect(self, codec: str, n: int, data: bytes) -> float:
        """The sum of the squares of a piece's values.

        Raises:
            ValueError: it holds what must not be averaged.
        """
        ...

    def combine(self, codec: str, n: int, parts: Sequence[tuple[bytes, float]]) -> bytes:
        """One piece averaged over parts, each with its weight."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A turn to be averaged."""

    turn: int
    fragment: int
    parts: Sequence[tuple[Path, int]]
    """File and tokens of each contribution, in the order of the clusters' names."""
    target: Path


@dataclass(frozen=True, slots=True)
class Average:
    """An average on the disk."""

    digest: str
    size_bytes: int


def part_bytes(averager: Averager, codec: str, pieces: Sequence[int]) -> int:
    """Size of a whole contribution to a fragment."""
    return sum(averager.size(codec, n) * times for n, times in Counter(pieces).items())


def norm_of(averager: Averager, codec: str, pieces: Sequence[int], path: Path) -> float:
    """The norm of a whole contribution, from its file.

    Raises:
        ValueError: it holds what must not be averaged; the text says what, and in which piece.
    """
    total = 0.0
    with path.open("rb") as stream:
        for number, n in enumerate(pieces):
            part = _read(stream, averager.size(codec, n), path)
            try:
                total += averager.inspect(codec, n, part)
            except ValueError as error:
                raise ValueError(f"piece {number}: {error}") from error
    return float(total**0.5)


def average(averager: Averager, codec: str, pieces: Sequence[int], job: Job) -> Average:
    """Write a turn's average and the hashes of its chunks, durably; the same bytes every time."""
    if not job.parts:
        return Average("", 0)
    partial = job.target.with_name(f"{job.target.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("rb")) for path, _ in job.parts]
        writer = _Writer(stack.enter_context(partial.open("wb")))
        for n in pieces:
            size = averager.size(codec, n)
            parts = [
                (_read(stream, size, path), float(tokens))
                for stream, (path, tokens) in zip(streams, job.parts, strict=True)
            ]
            writer.write(averager.combine(codec, n, parts))
        chunks = writer.finish()
    notes = chunk_list(job.target)
    notes.write_text("".join(f"{sha256}\n" for sha256 in chunks))
    partial.replace(job.target)
    _sync(notes)
    _sync(job.target.parent)
    return Average(digest_of(chunks), writer.size_bytes)


class _Writer:
    """Writes a file and hashes its chunks as they fill."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self._chunks: list[str] = []
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        view = memoryview(data)
        while view:
            part = view[: CHUNK_BYTES - self.size_bytes % CHUNK_BYTES]
            self._hash.update(part)
            self.size_bytes += len(part)
            view = view[len(part) :]
            if self.size_bytes % CHUNK_BYTES == 0:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._chunks.append(self._hash.hexdigest())
        self._hash = hashlib.sha256()

    def finish(self) -> list[str]:
        if self.size_bytes % CHUNK_BYTES:
            self._end_chunk()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._chunks


def _read(stream: BinaryIO, size: int, path: Path) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise OSError(f"{path} ends {size - len(data)} bytes too early")
    return data


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

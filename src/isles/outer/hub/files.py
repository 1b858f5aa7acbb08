"""Files of the hub: those that come in chunks, resumable at any time, and the averages."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from isles.outer.messages import CHUNK_BYTES, chunk_size, digest_of, num_chunks


class WrongHash(ValueError):
    pass


class Sealed(RuntimeError):
    """The file is whole and closed: nothing more is written to it."""


class Incoming:
    """A file that comes in chunks, in any order, some perhaps twice. Any thread may put.

    What has come is noted in a file beside it, which is believed only as far as the bytes on the
    disk bear it out: after a crash the chunks are hashed again.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.is_sealed = False
        self._lock = threading.Lock()
        self._notes = path.with_name(f"{path.name}.chunks")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._has = self._recover()
        os.ftruncate(self._file, size_bytes)
        self._log = os.open(self._notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for index, sha256 in self._has.items():
            os.write(self._log, f"{index} {sha256}\n".encode())

    def _recover(self) -> dict[int, str]:
        try:
            lines = self._notes.read_text().splitlines()
        except (FileNotFoundError, UnicodeDecodeError):
            return {}
        noted = {}
        for line in lines:
            index, _, sha256 = line.partition(" ")
            if index.isdecimal() and int(index) < num_chunks(self.size_bytes):
                noted[int(index)] = sha256
        return {index: sha for index, sha in noted.items() if self._hash(index) == sha}

    def _hash(self, index: int) -> str:
        data = os.pread(self._file, chunk_size(self.size_bytes, index), index * CHUNK_BYTES)
        return hashlib.sha256(data).hexdigest()

    def put(self, index: int, data: bytes, sha256: str) -> None:
        """Keep one chunk.

        Raises:
            WrongHash: the data are not what the hash says; what was there stays.
            Sealed: the file is whole already, and this chunk differs from it.
            OSError: the disk does not take it.
        """
        assert len(data) == chunk_size(self.size_bytes, index)
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise WrongHash(f"chunk {index} has sha256 {found}, announced was {sha256}")
        with self._lock:
            if self._has.get(index) == sha256:
                return
            if self.is_sealed:
                raise Sealed(str(self.path))
            self._has.pop(index, None)
            _write(self._file, data, index * CHUNK_BYTES)
            self._has[index] = sha256
            os.write(self._log, f"{index} {sha256}\n".encode())

    def received(self) -> dict[int, str]:
        with self._lock:
            return dict(self._has)

    def seal(self, digest: str) -> list[int]:
        """Close the file if it is whole, and force it to the disk.

        Returns:
            Nothing, or the chunks that are missing; all of them where they do not make up the
            digest.
        """
        with self._lock:
            total = num_chunks(self.size_bytes)
            missing = [index for index in range(total) if index not in self._has]
            if not missing and digest_of(self._has[i] for i in range(total)) != digest:
                missing = list(range(total))
            if not missing:
                os.fsync(self._file)
                self.is_sealed = True
            return missing

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                os.close(self._log)
                self._file = self._log = -1

    def discard(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def is_safetensors(path: Path) -> bool:
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return 2 <= length <= path.stat().st_size - 8 and stream.read(1) == b"{"


def chunk_list(path: Path) -> Path:
    return path.with_name(f"{path.name}.hashes")


def write_hashes(incoming: Incoming, path: Path) -> None:
    """Let those who fetch a file that has come know the hashes of its chunks."""
    hashes = [sha256 for _, sha256 in sorted(incoming.received().items())]
    chunk_list(path).write_text("".join(f"{sha256}\n" for sha256 in hashes))


class Averager(Protocol):
    """What the hub must know of codecs; `isles.outer.average` is one.

    A codec is a word; pieces are numbers of elements.
    """

    def size(self, codec: str, n: int) -> int: ...

    def inspect(self, codec: str, n: int, data: bytes) -> float:
        """The sum of the squares of a piece's values.

        Raises:
            ValueError: it holds what must not be averaged.
        """
        ...

    def combine(self, codec: str, n: int, parts: Sequence[tuple[bytes, float]]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Job:
    outer_step: int
    fragment: int
    parts: Sequence[tuple[Path, int]]
    """File and tokens of each contribution, in the order of the clusters' names."""
    target: Path


@dataclass(frozen=True, slots=True)
class Average:
    digest: str
    size_bytes: int


def part_bytes(averager: Averager, codec: str, pieces: Sequence[int]) -> int:
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
    """Write an average and the hashes of its chunks, durably; the same bytes every time."""
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

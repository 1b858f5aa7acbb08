"""Files that come in chunks, each with its hash: resumable at any time, by either side."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

from isles.outer.messages import CHUNK_BYTES, chunk_size, digest_of, num_chunks


class WrongHash(ValueError):
    """A chunk is not what its hash says."""


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
        """The chunks that are there, with their hashes."""
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
        """Close the files; they stay on the disk."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                os.close(self._log)
                self._file = self._log = -1

    def discard(self) -> None:
        """Remove the files."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do: the length of a header in JSON, then the header."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return 2 <= length <= path.stat().st_size - 8 and stream.read(1) == b"{"


def chunk_list(path: Path) -> Path:
    """Where the hashes of a file's chunks stand."""
    return path.with_name(f"{path.name}.hashes")


def write_hashes(incoming: Incoming, path: Path) -> None:
    """Let those who fetch a file that has come know the hashes of its chunks."""
    hashes = [sha256 for _, sha256 in sorted(incoming.received().items())]
    chunk_list(path).write_text("".join(f"{sha256}\n" for sha256 in hashes))

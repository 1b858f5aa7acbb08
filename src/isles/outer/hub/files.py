"""Files of the hub: chunked uploads, resumable at any time, and the averages."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from isles.outer.hub.rules import Refusal
from isles.outer.messages import CHUNK_BYTES, chunk_size, digest_of, hash_chunks, num_chunks
from isles.outer.parallel import in_order

COMING = ".coming"
_SLACK_BYTES = 4 * 2**20
"""Additional bytes of a state's file: its header, with a name for each tensor."""


def coming(path: Path) -> Path:
    """Path of a file's bytes until the file is kept. Only `Incoming` reads it."""
    return path.with_name(f"{path.name}{COMING}")


class Incoming:
    """A file that arrives in chunks, in any order, some perhaps twice. Any thread may put.

    The chunks go into a second file, which `keep` renames to the final path after it is complete
    and checked. So no sender can write to a file that the hub uses. After a restart, all bytes on
    the disk count as chunks, whatever their content. A path has at most one open object at a time.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.goal, self.path, self.size_bytes = path, coming(path), size_bytes
        self._is_sealed = self._is_closed = False
        self._lock = threading.Lock()
        is_new = not self.path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as stream:
            stream.truncate(size_bytes)
        self._has = {} if is_new else dict(enumerate(hash_chunks(self.path)))

    def put(self, index: int, data: bytes, sha256: str) -> None:
        """Store one chunk.

        Raises:
            Refusal: the data does not match the hash; or the file is complete already, and this
                chunk differs from it. Existing data stays.
            OSError: the disk cannot store it.
        """
        assert len(data) == chunk_size(self.size_bytes, index)
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            what = f"chunk {index} has sha256 {found}, but {sha256} was announced"
            raise Refusal("hash", what, "send it again")
        with self._lock:
            if self._has.get(index) == sha256:
                return
            if self._is_closed:
                raise Refusal("closed", "this file is not needed any more")
            if self._is_sealed:
                raise Refusal("sealed", "this contribution is complete already")
            self._has.pop(index, None)
            with self.path.open("r+b") as stream:
                stream.seek(index * CHUNK_BYTES)
                stream.write(data)
            self._has[index] = sha256

    def received(self) -> dict[int, str]:
        with self._lock:
            return dict(self._has)

    def seal(self, digest: str) -> None:
        """Close the complete file, and force it to the disk.

        Raises:
            Refusal: chunks are missing, or do not match the digest.
        """
        with self._lock:
            total = num_chunks(self.size_bytes)
            if digest_of(self._has.get(index, "") for index in range(total)) != digest:
                raise Refusal(
                    "incomplete",
                    f"some of the {total} chunks are missing or do not match the announcement",
                    "query the stored chunks and send the others",
                )
            _sync(self.path)
            self._is_sealed = True

    def keep(self) -> None:
        """Move the sealed and checked file to its final path. No sender can change it any more.

        Raises:
            Refusal: the file was closed in the meantime.
        """
        with self._lock:
            if self._is_closed or not self._is_sealed or not self.path.exists():
                raise Refusal("closed", "this file is not needed any more", "send it again")
            self.path.replace(self.goal)
            _sync(self.goal.parent)
            self._is_closed = True

    def close(self) -> None:
        """Accept no more chunks, and never be kept."""
        with self._lock:
            self._is_closed = True


def chunk_list(path: Path) -> Path:
    """The file with the hashes of a file's chunks, for clusters that fetch it."""
    return path.with_name(f"{path.name}.hashes")


def write_chunk_list(path: Path, hashes: Iterable[str]) -> None:
    chunk_list(path).write_text("".join(f"{sha256}\n" for sha256 in hashes))


@dataclass(frozen=True, slots=True)
class AveragingJob:
    """A round to average."""

    outer_step: int
    parts: Sequence[tuple[Path, int]]
    """File and tokens of each contribution, in the order of the clusters' names."""
    target: Path


def part_bytes(codec: str, pieces: Sequence[int]) -> int:
    """The size of a contribution. Imports torch, like all code that reads numbers.

    Args:
        codec: a word as in `Codec.text`.
        pieces: numbers of elements.

    Raises:
        UserError: the codec is unknown.
    """
    from isles.outer import average as codecs

    return sum(codecs.size(codec, n) * times for n, times in Counter(pieces).items())


def average_bytes(codec: str, pieces: Sequence[int], num_parts: int) -> int:
    """The size of an average over `num_parts` contributions; see `part_bytes`."""
    from isles.outer import average as codecs

    counted = Counter(pieces).items()
    return sum(codecs.average_size(codec, n, num_parts) * times for n, times in counted)


def state_bytes(pieces: Sequence[Sequence[int]]) -> int:
    """The maximum size of the files of a state: outer parameters and momentum of all pieces."""
    return sum(8 * sum(counts) + _SLACK_BYTES for counts in pieces)


def norm_of(codec: str, pieces: Sequence[int], path: Path, *, threads: int = 1) -> float:
    """The norm of a whole contribution, from its file.

    Args:
        threads: pieces that are read at the same time.

    Raises:
        ValueError: it must not be averaged; the text has the reason and the piece.
    """
    from isles.outer import average as codecs

    size, inspect = partial(codecs.size, codec), partial(codecs.inspect, codec)
    return _norm(pieces, path, size, inspect, threads)


def average_norm(codec: str, pieces: Sequence[int], num_parts: int, path: Path) -> float:
    """The norm of a whole average over `num_parts` contributions; as `norm_of`."""
    from isles.outer import average as codecs

    def size(n: int) -> int:
        return codecs.average_size(codec, n, num_parts)

    return _norm(pieces, path, size, partial(codecs.inspect_average, codec), 1)


def _norm(
    pieces: Sequence[int],
    path: Path,
    size: Callable[[int], int],
    inspect: Callable[[int, bytes], float],
    threads: int,
) -> float:
    with _opened(path) as file:

        def square_sum(place: tuple[int, int, int]) -> float:
            number, n, start = place
            data = _read(file, size(n), start, path)
            try:
                return inspect(n, data)
            except ValueError as error:
                raise ValueError(f"piece {number}: {error}") from error

        starts = itertools.accumulate(map(size, pieces), initial=0)
        places = zip(itertools.count(), pieces, starts, strict=False)
        return float(sum(in_order(square_sum, places, threads=threads)) ** 0.5)


def measure(codec: str, pieces: Sequence[int], job: AveragingJob) -> dict[int, float | str]:
    """Check the contributions of a job in their current files.

    Returns:
        For each member's number the norm of its contribution, or why it cannot be averaged.
    """
    found = dict[int, float | str]()
    for path, _ in job.parts:
        number = int(path.stem)
        try:
            norm = norm_of(codec, pieces, path)
        except ValueError as error:
            found[number] = str(error)
        except (FileNotFoundError, EOFError) as error:
            found[number] = f"its file is damaged: {error}"
        else:
            found[number] = norm if math.isfinite(norm) else f"its norm is {norm}"
    return found


def average(
    codec: str, pieces: Sequence[int], job: AveragingJob, *, threads: int = 1
) -> tuple[str, int]:
    """Write an average and the hashes of its chunks, durably; deterministic.

    Args:
        threads: pieces that are averaged at the same time.

    Returns:
        Its digest and its size in bytes; an empty digest and 0 if there is nothing to average.
    """
    from isles.outer import average as codecs

    if not job.parts:
        return "", 0
    beside = job.target.with_name(f"{job.target.name}.partial")
    beside.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = [(stack.enter_context(_opened(path)), path) for path, _ in job.parts]
        weights = [float(tokens) for _, tokens in job.parts]

        def combine(place: tuple[int, int]) -> bytes:
            n, start = place
            size = codecs.size(codec, n)
            datas = (_read(file, size, start, path) for file, path in files)
            return codecs.combine_each(codec, n, weights, datas)

        goal = stack.enter_context(beside.open("wb"))
        starts = itertools.accumulate((codecs.size(codec, n) for n in pieces), initial=0)
        places = zip(pieces, starts, strict=False)
        for data in in_order(combine, places, threads=threads):
            goal.write(data)
    hashes, size_bytes = hash_chunks(beside, threads=threads), beside.stat().st_size
    write_chunk_list(job.target, hashes)
    _sync(beside)
    _sync(chunk_list(job.target))
    beside.replace(job.target)
    _sync(job.target.parent)
    return digest_of(hashes), size_bytes


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _read(file: int, size: int, start: int, path: Path) -> bytes:
    # Any thread may read any place. One call reads at most 2 GiB, which is more than a piece.
    data = os.pread(file, size, start)
    if len(data) != size:
        raise EOFError(f"{path} is {size - len(data)} bytes too short")
    return data


def _sync(path: Path) -> None:
    with _opened(path) as handle:
        os.fsync(handle)

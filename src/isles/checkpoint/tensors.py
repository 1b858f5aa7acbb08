"""Tensors in the files of a checkpoint. torch plans the reads and writes of each rank.

Each rank writes the numbers of its tensors, one after the other, into `tensors-RANK.bin`. Rank 0
writes the place of each tensor into `tensors.json`. No file of a checkpoint is a pickle. isles also
reads the archives of isles 0.1.0, which torch wrote, without running the pickles in them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from isles.errors import TrainingError, UserError
from isles.facts.units import format_bytes
from isles.run.index import INDEX, Index, IndexFault, Piece, SavedTensor, index_text, read_index
from isles.run.manifest import MANIFEST, is_count
from isles.run.pickled import PickledInstance, PickleFault, read_pickle
from isles.run.records import used_up

_FULL_BYTES = 1 << 20
"""If less space is free, a failed write counts as a full disk."""

_KINDS = ({"float16", "bfloat16", "float32", "float64"}, {"int32", "int64"})
_BUFFER_BYTES = 1 << 20
_HEAD_BYTES, _HEAD_NAMES = 30, 26
"""Size of a file's head in an archive, and the place of two lengths in it: name and extra field."""


class TensorWriter(StorageWriter):
    """Writes this rank's tensors into a folder that exists, and hashes them from memory.

    Args:
        moved: called after each tensor.
    """

    def __init__(self, folder: Path, moved: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._moved = moved
        self.files: dict[str, dict[str, Any]] = {}
        """Size and SHA-256 of the files that this rank has written, by name."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = (f"tensors-{rank:05d}.bin" for rank in range(len(plans)))
        return [dataclasses.replace(p, storage_data=n) for p, n in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(self._write(plan, planner))
        except (OSError, RuntimeError) as error:
            # The error names the disk, because the other ranks see only this error.
            raise disk_failure(error, self._folder, dist.get_rank()) from error
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results, start, digest = [], 0, hashlib.sha256()
        with (self._folder / plan.storage_data).open("wb", buffering=_BUFFER_BYTES) as stream:
            for item in plan.items:
                value = planner.resolve_data(item)
                assert isinstance(value, Tensor), item.index
                numbers = _bytes_of(value.detach().cpu().contiguous())
                stream.write(numbers)
                digest.update(numbers)  # releases the interpreter's lock
                self._moved()
                place = (plan.storage_data, start, len(numbers))
                results.append(WriteResult(item.index, len(numbers), place))
                start += len(numbers)
            stream.flush()
            os.fsync(stream.fileno())
        self._note(plan.storage_data, start, digest.hexdigest())
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {(r.index.fqn, r.index.offset): r.storage_data for rank in results for r in rank}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), name
            pieces = tuple(
                Piece(tuple(chunk.offsets), tuple(chunk.sizes), *places[name, chunk.offsets])
                for chunk in entry.chunks
            )
            tensors[name] = SavedTensor(_name_of(entry.properties.dtype), tuple(entry.size), pieces)
        text = index_text(tensors).encode()
        (self._folder / INDEX).write_bytes(text)
        self._note(INDEX, len(text), hashlib.sha256(text).hexdigest())

    def _note(self, name: str, size: int, sha256: str) -> None:
        self.files[name] = {"size": size, "sha256": sha256}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class TensorReader(StorageReader):
    """Reads tensors from the folder of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: Index | None = None
        self._pieces: dict[tuple[str, tuple[int, ...]], tuple[SavedTensor, Piece]] = {}

    def index(self) -> Index:
        """The tensors that the checkpoint has.

        Raises:
            TrainingError: its index is broken.
        """
        if self._index is None:
            try:
                self._index = read_index(self._folder)
            except IndexFault as error:
                raise TrainingError(
                    f"cannot read the checkpoint's index: {error}",
                    where=str(self._folder / error.file),
                    fix="choose another checkpoint from `isles checkpoint list`",
                    id="checkpoint.broken",
                ) from error
            for name, entry in self._index.tensors.items():
                self._pieces |= {(name, piece.offsets): (entry, piece) for piece in entry.pieces}
        return self._index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(_dtype_of(entry)),
                    torch.Size(entry.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                        for piece in entry.pieces
                    ],
                )
                for name, entry in self.index().tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[tuple[ReadItem, SavedTensor, Piece]]] = {}
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None, item.storage_index
            entry, piece = self._pieces[item.storage_index.fqn, tuple(offset)]
            files.setdefault(piece.file, []).append((item, entry, piece))
        for name, wanted in files.items():
            with (self._folder / name).open("rb") as stream:
                for item, entry, piece in sorted(wanted, key=lambda one: one[2].start):
                    goal = planner.resolve_tensor(item).detach()
                    self._read(stream, entry, piece, item, goal)
                    planner.commit_tensor(item, goal)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(
        self, stream: BinaryIO, entry: SavedTensor, piece: Piece, item: ReadItem, goal: Tensor
    ) -> None:
        is_whole = tuple(item.lengths) == piece.sizes
        if self.index().is_old:
            part = _unpacked(stream, entry, piece)
        elif is_whole and _takes_bytes(goal, entry):
            _fill(goal, stream, piece.start)
            return
        else:
            part = torch.empty(piece.sizes, dtype=_dtype_of(entry))
            _fill(part, stream, piece.start)
        if not is_whole:
            for dimension, (at, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dimension, at, size)
        goal.copy_(part)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class TensorPlanner(DefaultLoadPlanner):
    """Plans the reading of tensors and refuses all other entries, which torch would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TrainingError(f"{read_item.dest_index.fqn} is not a tensor", id="checkpoint.broken")


def converts(saved: str, dtype: torch.dtype) -> bool:
    """True if numbers of an index's type may fill a tensor of another type.

    Strategies keep weights, moments and counters in different widths, and each resumes the
    checkpoints of the others. A conversion between kinds would change the numbers silently.
    """
    here = _name_of(dtype)
    return here == saved or any(here in kind and saved in kind for kind in _KINDS)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(entry: SavedTensor) -> torch.dtype:
    found = getattr(torch, entry.dtype)  # one of ITEM_BYTES
    assert isinstance(found, torch.dtype)
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    # The tensor is contiguous and in CPU memory, so nothing is copied.
    numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _takes_bytes(goal: Tensor, entry: SavedTensor) -> bool:
    return goal.device.type == "cpu" and goal.is_contiguous() and goal.dtype == _dtype_of(entry)


def _fill(tensor: Tensor, stream: BinaryIO, start: int) -> None:
    stream.seek(start)
    numbers = _bytes_of(tensor)
    if stream.readinto(numbers) != len(numbers):  # type: ignore[attr-defined]
        raise OSError(None, "a file of the checkpoint ends too early")


def _unpacked(stream: BinaryIO, entry: SavedTensor, piece: Piece) -> Tensor:
    # A piece of isles 0.1.0 is an archive of the numbers and of a pickle with their layout. The
    # layout must match the index, and only the numbers are used.
    try:
        return _from_archive(stream, entry, piece)
    except (
        *(zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, struct.error),
        *(ValueError, LookupError, TypeError, OverflowError),
    ) as error:
        why = str(error) if isinstance(error, PickleFault) else type(error).__name__
        raise TrainingError(
            f"{piece.file} has no valid tensor at byte {piece.start} ({why})",
            fix="choose another checkpoint from `isles checkpoint list`",
            id="checkpoint.broken",
        ) from error


def _from_archive(stream: BinaryIO, entry: SavedTensor, piece: Piece) -> Tensor:
    window = _Window(stream, piece)
    with zipfile.ZipFile(window) as archive:
        found = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        program, numbers = found["data.pkl"], found["data/0"]
        for info in (program, numbers):
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise ValueError(info.filename)
        built = read_pickle(archive.read(program))
    if not isinstance(built, PickledInstance) or not built.name.startswith(
        "torch._utils._rebuild_tensor_"
    ):
        raise TypeError(built)
    storage, offset, sizes, strides = built.args[:4]
    if storage.name != "storage" or storage.args[2] != "0" or sizes != piece.sizes:
        raise TypeError(storage)
    if not is_count(offset) or len(strides) != len(sizes) or not all(map(is_count, strides)):
        raise TypeError(strides)
    dtype = _dtype_of(entry)
    count = numbers.file_size // dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if 0 not in sizes and last >= count:
        raise IndexError(last)
    window.seek(numbers.header_offset)
    head = window.read(_HEAD_BYTES)
    start = numbers.header_offset + _HEAD_BYTES + sum(struct.unpack_from("<HH", head, _HEAD_NAMES))
    if start + numbers.file_size > piece.length:
        raise IndexError(start)
    storage_ = torch.empty(count, dtype=dtype)
    _fill(storage_, stream, piece.start + start)
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    return storage_.as_strided(sizes, strides, offset)


class _Window(io.RawIOBase):
    # The bytes of one piece as a file, so that zipfile reads only a little at a time.
    _MOST_BYTES = 1 << 20

    def __init__(self, stream: BinaryIO, piece: Piece) -> None:
        self._stream, self._start, self._length, self._at = stream, piece.start, piece.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if not 0 <= base + offset <= self._length:
            raise ValueError(offset)
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = self._length - self._at
        size = left if size < 0 else min(size, left)
        if size > self._MOST_BYTES:
            raise ValueError(size)
        self._stream.seek(self._start + self._at)
        data = self._stream.read(size)
        self._at += len(data)
        return data


def disk_failure(error: BaseException, folder: Path, rank: int) -> TrainingError:
    """The error for a failed write: the reason, the path and the free space."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        free_bytes = 0
    cause, free = root_cause(error), f"{format_bytes(free_bytes)} free on this disk"
    what = f"{cause}; {free}"
    if free_bytes < _FULL_BYTES and not isinstance(error, OSError):
        what = f"the disk is full, {free} ({cause})"  # torch only says that a file ended early
    limit = used_up(error, folder)
    room = limit[1] if limit else "free some space on it, lower checkpoint.keep"
    above = (folder, *folder.parents[:2])
    is_saved = any(True for each in above for _ in each.glob(f"step-*/{MANIFEST}"))
    resumes = "resumes from the last complete checkpoint, which is unchanged"
    return TrainingError(
        what,
        where=f"{folder}, rank {rank} on {socket.gethostname()}",
        fix=f"{room} or set another output_dir; `isles train` again "
        + (resumes if is_saved else "starts at step 0, as no checkpoint was saved before"),
        id="checkpoint.unsaved",
    )


def root_cause(error: BaseException) -> str:
    """The cause in one line: torch reports the failures of all ranks in one exception."""
    if isinstance(error, CheckpointException):
        rank, cause = first_failure(error)
        return f"rank {rank}: {root_cause(cause)}"
    if isinstance(error, UserError):
        return error.what
    lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The first rank that failed, and its error."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return int(rank), cause

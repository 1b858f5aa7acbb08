"""One checkpoint folder: written beside, hashed, read back, renamed; loaded without pickles."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import warnings
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from isles.errors import TrainingError, UserError
from isles.facts.units import format_bytes
from isles.run.checkpoints import (
    MANIFEST,
    PARTIAL_PREFIX,
    hash_files,
    sync_folder,
    verify_checkpoint,
)
from isles.run.records import write_record

_FULL_BYTES = 1 << 20
"""With less than that free, whatever could not be written met a full disk."""


def stage(state: dict[str, Any], replicas: tuple[int, int]) -> dict[str, Tensor]:
    """A copy in CPU memory of what this rank writes.

    Replicated tensors are dealt out by size over the ranks that hold them, so that each is copied
    and written once; shards stay with their rank.

    Args:
        state: tensors and shards (DTensors) by name.
        replicas: this rank's number among those that hold the same plain tensors, and how many
            they are.
    """
    rank, world_size = replicas
    plain = [name for name, value in state.items() if not isinstance(value, DTensor)]
    assigned = [0] * world_size
    mine: set[str] = {name for name in state if isinstance(state[name], DTensor)}
    for name in sorted(plain, key=lambda n: (-state[n].numel() * state[n].element_size(), n)):
        owner = assigned.index(min(assigned))
        assigned[owner] += state[name].numel() * state[name].element_size()
        if owner == rank:
            mine.add(name)
    return {
        name: value.detach().to("cpu", copy=True) for name, value in state.items() if name in mine
    }


def write_shards(staged: dict[str, Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    """Write this rank's part into a folder beside the final one. All ranks must call this.

    Each rank writes into its own `folder`; where nodes have disks of their own, the parts are
    brought together afterwards.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(staged, storage_writer=_Writer(folder), process_group=group)


class _FoldersThatAreThere(FileSystem):
    """torch makes the folder of a checkpoint with all that is above it, and so made a run directory
    again that was deleted. The folder is there: `CheckpointManager` and `Travel` make it."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make nothing."""


class _Writer(FileSystemWriter):
    """Says where a disk is that does not take a part: the others hear of it by this error alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _FoldersThatAreThere()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part.

        Raises:
            TrainingError: this rank's disk does not take it.
        """
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            raise disk_fault(error, Path(str(self.path)), dist.get_rank()) from error


def disk_fault(error: BaseException, folder: Path, rank: int) -> TrainingError:
    """What a disk that does not take a file says, and where it is."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        free_bytes = 0
    cause, free = root_cause(error), f"{format_bytes(free_bytes)} are free on this disk"
    what = f"{cause}; {free}"
    if free_bytes < _FULL_BYTES and not isinstance(error, OSError):
        what = f"the disk is full, {free} ({cause})"  # torch only says that a file ended early
    return TrainingError(
        what,
        where=f"{folder}, rank {rank} on {socket.gethostname()}",
        fix="free some space there, lower checkpoint.keep or set another output_dir; "
        "`isles train` again goes on from the last whole checkpoint, which is untouched",
        id="checkpoint.unsaved",
    )


def seal(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Hash a written folder, read it back from the disk, and give it its name. Rank 0 only.

    Raises:
        TrainingError: what the disk gives back is not what was written.
    """
    record = {**manifest, "files": hash_files(partial)}
    write_record(partial / MANIFEST, record)
    for file in partial.iterdir():
        _flush(file)
    sync_folder(partial)
    if faults := verify_checkpoint(partial):
        raise TrainingError(
            f"a checkpoint reads back differently than it was written: {'; '.join(faults)}",
            where=str(partial),
            fix="check the disk (dmesg, smartctl); the previous checkpoint is untouched",
            id="checkpoint.unsaved",
        )
    doomed = _doomed(final)
    if final.exists():  # the same step with an average that came after it
        final.replace(doomed)
    partial.replace(final)
    sync_folder(final.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a checkpoint so that a kill in the middle leaves nothing that looks whole."""
    doomed = _doomed(folder)
    folder.replace(doomed)
    shutil.rmtree(doomed)


def _doomed(folder: Path) -> Path:
    return folder.with_name(f"{PARTIAL_PREFIX}removed-{folder.name.lstrip('.')}")


def load_tensors(state: dict[str, Any], folder: Path, *, alone: bool = False) -> None:
    """Fill the tensors of `state` from a checkpoint, in place, on any number of ranks.

    Args:
        state: tensors (or shards) by name, as an engine's `state_dict` gives them.
        folder: the checkpoint.
        alone: this process loads without the others; otherwise all ranks must call this.

    Raises:
        TrainingError: the checkpoint lacks a tensor, or holds it in another shape.
    """
    reader = SafeReader(str(folder))
    _check(state, reader.read_metadata(), folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(state, storage_reader=reader, no_dist=alone)
        except CheckpointException as error:
            raise TrainingError(
                f"the checkpoint could not be read: {root_cause(error)}",
                where=str(folder),
                fix="check the disk, or take another one from `isles checkpoint list`",
                id="checkpoint.broken",
            ) from error


def _check(state: dict[str, Any], metadata: Metadata, folder: Path) -> None:
    known = metadata.state_dict_metadata
    missing = [name for name in state if name not in known]
    if missing:
        raise TrainingError(
            f"the checkpoint lacks {len(missing)} tensors, the first {missing[0]!r}",
            where=str(folder),
            fix="resume with the model and the optimizer that the run was started with",
            id="checkpoint.unlike",
        )
    for name, value in state.items():
        saved = tuple(getattr(known[name], "size", ()))
        if saved != tuple(value.shape):
            raise TrainingError(
                f"{name} has shape {saved} in the checkpoint and {tuple(value.shape)} here",
                where=str(folder),
                fix="resume with the model, tokenizer and adapter that the run was started with",
                id="checkpoint.unlike",
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
    """The first rank that failed, and of what."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return int(rank), cause


class SafeReader(FileSystemReader):
    """Reads a checkpoint whose index may name torch's own metadata types and nothing else.

    torch keeps the index (`.metadata`) as a pickle; its plain reader would run whatever code a
    tampered file names.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint.

        Raises:
            TrainingError: the index names something that does not belong into one.
        """
        path = Path(str(self.path)) / ".metadata"
        try:
            with path.open("rb") as stream:
                metadata: Metadata = _MetadataUnpickler(stream).load()
        except (pickle.UnpicklingError, EOFError, FileNotFoundError) as error:
            raise TrainingError(
                f"the checkpoint's index cannot be read: {error}",
                where=str(path),
                fix="take another checkpoint: `isles checkpoint list`",
                id="checkpoint.broken",
            ) from error
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    _METADATA = "torch.distributed.checkpoint.metadata"
    _ALLOWED = frozenset(
        {
            (_METADATA, "Metadata"),
            (_METADATA, "MetadataIndex"),
            (_METADATA, "TensorStorageMetadata"),
            (_METADATA, "BytesStorageMetadata"),
            (_METADATA, "ChunkStorageMetadata"),
            (_METADATA, "TensorProperties"),
            (_METADATA, "StorageMeta"),
            (_METADATA, "_MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("pathlib._local", "PosixPath"):
            return PosixPath  # as Python 3.13 names it
        if (module, name) == ("builtins", "getattr"):
            return _memory_format  # Python 3.11 before 3.11.4 writes members of an enum so
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")


def _memory_format(kind: Any, name: Any) -> Any:
    # What `getattr` may do in an index: name a member of torch's one enum there.
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it names {name!r} of {kind!r}, which is no part of an index")
    return _MEM_FORMAT_ENCODING[name]


def _flush(file: Path) -> None:
    # To the disk, and out of the page cache, so that reading back reads the disk.
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)

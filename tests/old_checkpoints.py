"""Checkpoints as isles 0.1.0 wrote them, through torch, and such as somebody has tampered with."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from isles.checkpoint.load import load_tensors
from isles.checkpoint.tensors import TensorReader
from isles.run.checkpoints import describe_file
from isles.run.manifest import MANIFEST
from isles.run.records import read_record, write_record


class Call:
    """Pickled, it is a call of a function, which a plain unpickler makes."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    entries = TensorReader(folder).index().tensors
    state = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in entries.items()
    }
    load_tensors(state, folder, alone=True)
    return state


def write_old(state: dict[str, torch.Tensor], folder: Path) -> None:
    """The tensors as isles 0.1.0 wrote them: `.metadata` is a pickle, each tensor an archive."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)


def make_old(folder: Path) -> None:
    """Put a whole checkpoint into the form of isles 0.1.0."""
    state = tensors_of(folder)
    for file in (*folder.glob("tensors-*.bin"), folder / "tensors.json"):
        file.unlink()
    write_old(state, folder)
    hash_again(folder, version=1)


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """What a manifest lists: every file of a folder except itself."""
    files = sorted(entry for entry in folder.iterdir() if entry.name != MANIFEST)
    return {entry.name: describe_file(entry) for entry in files}


def hash_again(folder: Path, **more: object) -> None:
    """Write the manifest anew, with the right hash of every file."""
    record = read_record(folder / MANIFEST) or {}
    write_record(folder / MANIFEST, {**record, **more, "files": hash_files(folder)})


def change_index(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Change the index of an old checkpoint, as whoever can write there may."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def run_code(folder: Path, victim: str, function: object, *args: object) -> None:
    """Let an entry of the index of an old checkpoint be a pickle that calls a function."""
    torch.save(Call(function, *args), folder / "notes.bin")
    size = (folder / "notes.bin").stat().st_size

    def change(metadata: Metadata) -> None:
        entry: Any = BytesStorageMetadata()
        entry.size = metadata.state_dict_metadata[victim].size  # type: ignore[union-attr]
        metadata.state_dict_metadata[victim] = entry
        kept = {k: v for k, v in metadata.storage_data.items() if k.fqn != victim}
        metadata.storage_data = {**kept, MetadataIndex(victim): _StorageInfo("notes.bin", 0, size)}

    change_index(folder, change)


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file in place."""
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))

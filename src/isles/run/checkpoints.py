"""Checkpoints as both wings see them: folders with a manifest of hashes."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.errors import TrainingError, UserError
from isles.run.paths import RunDir
from isles.run.records import read_record

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
PARTIAL_PREFIX = ".partial-"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One whole checkpoint.

    Args:
        step: inner steps done when it was saved.
    """

    path: Path
    step: int
    manifest: dict[str, Any]

    @property
    def created_at(self) -> float:
        return float(self.manifest["created_at"])

    @property
    def size_bytes(self) -> int:
        return sum(int(entry["size"]) for entry in self.manifest["files"].values())


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint; names sort as steps do."""
    return f"step-{step:08d}"


def read_checkpoint(path: Path) -> CheckpointInfo:
    """One checkpoint from its folder; hashes are not checked here.

    Raises:
        TrainingError: the folder holds no manifest of this version.
    """
    manifest = read_record(path / MANIFEST)
    if manifest is None or not isinstance(manifest.get("files"), dict):
        raise TrainingError(
            "this folder is not a whole checkpoint: it has no readable manifest.json",
            where=str(path),
            fix="take another one from `isles checkpoint list`",
            id="checkpoint.broken",
        )
    if manifest.get("version") != MANIFEST_VERSION:
        raise TrainingError(
            f"the checkpoint has format {manifest.get('version')!r}, this isles reads "
            f"format {MANIFEST_VERSION}",
            where=str(path),
            fix="use the version of isles that wrote it: "
            f"{manifest.get('versions', {}).get('isles', 'unknown')}",
            id="checkpoint.unlike",
        )
    return CheckpointInfo(path, int(manifest["step"]), manifest)


def list_checkpoints(run_dir: RunDir) -> list[CheckpointInfo]:
    """The whole checkpoints of a run, oldest first; hashes are not checked here."""
    if not run_dir.checkpoints.is_dir():
        return []
    found = []
    for folder in sorted(run_dir.checkpoints.iterdir()):
        if folder.name.startswith("step-") and folder.is_dir():
            try:
                found.append(read_checkpoint(folder))
            except TrainingError:
                continue  # never taken for whole; `isles checkpoint verify` names it
    return sorted(found, key=lambda info: info.step)


def find_checkpoint(run_dir: RunDir, step: int | None) -> CheckpointInfo:
    """The checkpoint of a step, or the newest one.

    Raises:
        UserError: there is none; the message lists those there are.
    """
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        raise UserError(
            "this run has no checkpoint yet",
            where=str(run_dir.checkpoints),
            fix="let it train until its first save (checkpoint.every_steps), or stop it with "
            "`isles stop`, which saves",
            id="run.checkpoint",
        )
    if step is None:
        return checkpoints[-1]
    for info in checkpoints:
        if info.step == step:
            return info
    steps = ", ".join(str(info.step) for info in checkpoints)
    raise UserError(
        f"there is no checkpoint of step {step}",
        where=str(run_dir.checkpoints),
        fix=f"choose one of these steps: {steps}",
        id="run.checkpoint",
    )


def hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file of a folder but its manifest, by name."""
    files = sorted(entry for entry in folder.iterdir() if entry.name != MANIFEST)
    return {
        entry.name: {"size": entry.stat().st_size, "sha256": hash_file(entry)} for entry in files
    }


def verify_checkpoint(path: Path) -> list[str]:
    """Faults of a checkpoint, one line each; none where it is whole."""
    try:
        info = read_checkpoint(path)
    except TrainingError as error:
        return [error.what]
    damage = []
    for name, expected in info.manifest["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != expected["size"]:
                damage.append(f"{name}: {size} bytes, the manifest says {expected['size']}")
            elif hash_file(file) != expected["sha256"]:
                damage.append(f"{name}: its SHA-256 is not the manifest's: the bytes changed")
        except FileNotFoundError:
            damage.append(f"{name}: missing")
        except OSError as error:
            damage.append(f"{name}: cannot be read: {error.strerror}")
    return damage


def sync_folder(path: Path) -> None:
    """Make a folder's entries survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

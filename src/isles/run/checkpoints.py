"""Checkpoints: folders with a manifest of hashes."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.config.foreign import open_regular
from isles.errors import TrainingError, UserError
from isles.run.index import INDEXES, IndexFault, has_index, read_index
from isles.run.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    READ_VERSIONS,
    Manifest,
    ManifestError,
    step_of,
)
from isles.run.paths import RunDir
from isles.run.records import read_record

PARTIAL_PREFIX = ".partial-"

_TRIES = 16
"""Limit for the folders that isles reads to find the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One complete checkpoint.

    Args:
        step: finished inner steps when it was saved.
    """

    path: Path
    step: int
    manifest: Manifest

    @contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Raise a TrainingError if an invalid value of the manifest causes an error in the block.

        For values whose format only another part of isles knows.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise TrainingError(
                f"{key!r} in the manifest has a value that isles does not write: {error!r:.100}",
                where=str(self.path / MANIFEST),
                fix="use another checkpoint of `isles checkpoint list`",
                id="checkpoint.broken",
            ) from error

    @property
    def created_at(self) -> float:
        return self.manifest.created_at

    @property
    def size_bytes(self) -> int:
        return self.manifest.size_bytes


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint. Names sort by step."""
    return f"step-{step:08d}"


def read_checkpoint(path: Path) -> CheckpointInfo:
    """One checkpoint from its folder, without a check of its hashes.

    Raises:
        TrainingError: the folder has no manifest of this version.
    """
    record = read_record(path / MANIFEST, MAX_MANIFEST_BYTES) or {}
    version, versions = record.get("version"), record.get("versions")
    if isinstance(record.get("files"), dict) and version not in READ_VERSIONS:
        writer = versions.get("isles") if isinstance(versions, dict) else None
        raise TrainingError(
            f"the checkpoint has format {version!r:.40}, and this isles reads formats "
            f"{' and '.join(map(str, READ_VERSIONS))}",
            where=str(path),
            fix=f"use isles {writer or '(unknown version)'!s:.40}, which wrote it",
            id="checkpoint.unlike",
        )
    try:
        manifest = Manifest.from_record(record)
        if step_of(path.name) not in (None, manifest.step):
            raise ManifestError(f"its manifest is of step {manifest.step}")
    except ManifestError as error:
        raise TrainingError(
            f"this folder is not a complete checkpoint: {error}",
            where=str(path),
            fix="use another checkpoint from `isles checkpoint list`",
            id="checkpoint.broken",
        ) from None
    return CheckpointInfo(path, manifest.step, manifest)


def list_checkpoints(run_dir: RunDir) -> list[CheckpointInfo]:
    """The complete checkpoints of a run, oldest first, without a check of their hashes."""
    return sorted(each_checkpoint(run_dir), key=lambda info: info.step)


def each_checkpoint(run_dir: RunDir) -> Iterator[CheckpointInfo]:
    """Like `list_checkpoints`, but the highest step first, and with one manifest in memory at a
    time."""
    for folder in _folders(run_dir):
        try:
            yield read_checkpoint(folder)
        except TrainingError:
            continue  # never counts as complete, and `isles checkpoint verify` lists it


def newest_checkpoint(run_dir: RunDir) -> CheckpointInfo | None:
    """The newest complete checkpoint, or None if none is complete or many newer ones are
    damaged."""
    for folder in _folders(run_dir)[:_TRIES]:
        with suppress(TrainingError):
            return read_checkpoint(folder)
    return None


def _folders(run_dir: RunDir) -> list[Path]:
    if not run_dir.checkpoints.is_dir():
        return []
    steps = ((step_of(path.name), path) for path in run_dir.checkpoints.iterdir())
    # One folder per step, as reading another name of the same step is useless.
    named = [(n, path) for n, path in steps if n is not None and path.name == checkpoint_name(n)]
    return [path for _, path in sorted(named, reverse=True) if path.is_dir()]


def find_checkpoint(run_dir: RunDir, step: int | None) -> CheckpointInfo:
    """The checkpoint of a step, or the newest one.

    Raises:
        UserError: it does not exist. The error lists the existing steps.
    """
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        raise UserError(
            "this run has no checkpoint yet",
            where=str(run_dir.checkpoints),
            fix="wait for its first save (checkpoint.every_minutes or checkpoint.every_steps), or "
            "run `isles stop`, which saves",
            id="run.checkpoint",
        )
    if step is None:
        return checkpoints[-1]
    for info in checkpoints:
        if info.step == step:
            return info
    steps = ", ".join(str(info.step) for info in checkpoints)
    raise UserError(
        f"no checkpoint found for step {step}",
        where=str(run_dir.checkpoints),
        fix=f"choose one of these steps: {steps}",
        id="run.checkpoint",
    )


def hash_file(path: Path) -> str:
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as a manifest lists them."""
    return {"size": path.stat().st_size, "sha256": hash_file(path)}


def verify_checkpoint(path: Path, *, hashes: bool = True) -> list[str]:
    """Find the faults of a checkpoint, one line each; or an empty list if it is complete.

    Reads the index of the tensors like a load.

    Args:
        hashes: hash each file; if not, compare only its size.

    UserError: this user has no permission to read one of its files, which may be intact.
    """
    try:
        info = read_checkpoint(path)
    except TrainingError as error:
        return [error.what]
    damage = []
    for name, expected in info.manifest.files.items():
        file = path / name
        try:
            # A link may lead to any file of this machine, and a pipe would never end.
            found = file.lstat()
            if not stat.S_ISREG(found.st_mode):
                damage.append(f"{name}: not a regular file")
            elif found.st_size != expected.size:
                damage.append(
                    f"{name}: {found.st_size} bytes instead of {expected.size} in the manifest"
                )
            elif hashes and hash_file(file) != expected.sha256:
                damage.append(
                    f"{name}: its bytes have changed since the save (the SHA-256 differs)"
                )
        except FileNotFoundError:
            damage.append(f"{name}: missing")
        except PermissionError as error:
            raise UserError(
                f"this user has no permission to read {name} of the checkpoint",
                where=str(file),
                fix=f"ask its owner to run `chmod -R a+rX {shlex.quote(str(path))}`",
                id="checkpoint.closed",
            ) from error
        except OSError as error:
            damage.append(f"{name}: not readable ({error.strerror})")
    sizes = {name: facts.size for name, facts in info.manifest.files.items()}
    # A load would read it.
    unlisted = [name for name in INDEXES if name not in sizes and os.path.lexists(path / name)]
    damage += [f"{name}: this index is not in the manifest" for name in unlisted]
    if not damage and (has_index(sizes) or info.manifest.version > 1):
        try:
            read_index(path, sizes)
        except IndexFault as error:
            damage.append(f"{error.file}: {error}")
    return damage


def sync_folder(path: Path) -> None:
    """Make a folder's entries survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Load the newest intact checkpoint: copy it to every disk, and read it without pickles."""

from __future__ import annotations

import logging
import shutil
import stat
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from isles.checkpoint.tensors import TensorPlanner, TensorReader, converts, root_cause
from isles.dist.files import Disks, Progress, broadcast_folder
from isles.dist.world import World, raise_first
from isles.errors import TrainingError
from isles.run.checkpoints import (
    PARTIAL_PREFIX,
    CheckpointInfo,
    read_checkpoint,
    verify_checkpoint,
)
from isles.run.manifest import MANIFEST, MANIFEST_VERSION, READ_VERSIONS
from isles.run.paths import RunDir
from isles.run.records import MAX_LIST_BYTES, read_record

log = logging.getLogger(__name__)


def latest_good(run_dir: RunDir) -> CheckpointInfo | None:
    """The newest checkpoint with correct hashes, or None if the run has no checkpoint.

    Logs each broken checkpoint before it tries an older one.

    Raises:
        TrainingError: the run has checkpoints, but none can be resumed; or this isles cannot read
            the format of the newest checkpoint.
    """
    folders = sorted(run_dir.checkpoints.glob("step-*"), reverse=True)
    for folder in folders:
        record = read_record(folder / MANIFEST, MAX_LIST_BYTES) or {}
        if record.get("version", MANIFEST_VERSION) not in READ_VERSIONS:
            read_checkpoint(folder)  # raises an error with the version that wrote it
        issues = verify_checkpoint(folder)
        if not issues:
            return read_checkpoint(folder)
        log.warning("checkpoint %s is broken, skipping it: %s", folder.name, "; ".join(issues))
    if folders:
        raise TrainingError(
            f"all {len(folders)} checkpoints of this run are broken",
            where=str(run_dir.checkpoints),
            fix="check them with `isles checkpoint verify`, or start a new run with `--resume no`",
            id="checkpoint.broken",
        )
    return None


def sound_checkpoint(folder: Path) -> CheckpointInfo:
    """Check that a checkpoint's hashes are correct, and return it.

    Raises:
        TrainingError: a hash is wrong.
    """
    if issues := verify_checkpoint(folder):
        raise TrainingError(
            f"this checkpoint is broken: {'; '.join(issues)}",
            where=str(folder),
            fix="choose another checkpoint from `isles checkpoint list`",
            id="checkpoint.broken",
        )
    return read_checkpoint(folder)


@contextmanager
def on_this_disk(
    checkpoint: CheckpointInfo, run_dir: RunDir, world: World, disks: Disks, progress: Progress
) -> Iterator[Path]:
    """The folder of rank 0's checkpoint that this rank can load from. All ranks must call this.

    A node with a separate disk gets a copy, which is removed after the node has read it.

    Args:
        checkpoint: its folder is on rank 0's disk.
        disks: the nodes with a separate run directory.

    Raises:
        TrainingError: a disk fails or is too small, or a file has changed; on every rank.
    """
    if not disks.apart_leaders:
        yield checkpoint.path
        return
    folder, takes = checkpoint.path, world.rank in disks.apart_leaders
    if disks.is_apart[world.rank]:
        folder = run_dir.checkpoints / f"{PARTIAL_PREFIX}loading-{disks.keeper(world.rank)}"
    files = {name: facts.sha256 for name, facts in checkpoint.manifest.files.items()}
    try:
        takers = broadcast_folder(folder, world, src=0, needs=takes, files=files, progress=progress)
        log.info("sending checkpoint=%s to ranks=%s", checkpoint.path.name, takers)
        yield folder
        world.gather(None)  # the ranks of a node have all read it
    finally:
        if takes:
            shutil.rmtree(folder, ignore_errors=True)


def refuse_other_run(run_dir: RunDir, world: World, disks: Disks) -> None:
    """Refuse to write parts into another run of the same name on a node. All ranks must call this.

    Raises:
        TrainingError: a node that does not see rank 0's run directory has checkpoints in its
        own.
    """
    if not disks.apart_leaders:
        return
    failure = None
    found = sorted(run_dir.checkpoints.glob("step-*")) if world.rank in disks.apart_leaders else []
    if found:
        failure = TrainingError(
            f"this machine has another run with this name, at {found[-1].name}",
            where=f"{run_dir.path}, rank {world.rank} on {world.host}",
            fix=f"to resume that run, put {world.host} first in the hosts; otherwise set another "
            "`name` or output_dir, or move that folder away",
            id="run.elsewhere",
        )
    raise_first(world.gather(failure))


def load_tensors(
    state: dict[str, Any], folder: Path, *, alone: bool = False, optional: Collection[str] = ()
) -> list[str]:
    """Fill the tensors of `state` from a checkpoint, in place, on any number of ranks.

    Args:
        state: tensors (or shards) by name, as returned by an engine's `state_dict`.
        alone: load in this process only; otherwise all ranks must call this.
        optional: tensors that keep their values if the checkpoint lacks them.

    Returns:
        The optional tensors that the checkpoint lacks.

    Raises:
        TrainingError: the checkpoint lacks a tensor, or its shape or kind of numbers differs.
    """
    reader = TensorReader(folder)
    known = reader.index().tensors
    absent = [name for name in state if name in optional and name not in known]
    state = {name: value for name, value in state.items() if name not in absent}
    missing = [name for name in state if name not in known]
    if missing:
        raise TrainingError(
            f"the checkpoint lacks {len(missing)} tensors, the first {missing[0]!r}",
            where=str(folder),
            fix="resume with the model and the optimizer that the run was started with",
            id="checkpoint.unlike",
        )
    for name, value in state.items():
        saved = known[name].shape
        if saved != tuple(value.shape):
            raise TrainingError(
                f"{name} has shape {saved} in the checkpoint but {tuple(value.shape)} in this run",
                where=str(folder),
                fix="resume with the model, tokenizer and adapter that the run was started with",
                id="checkpoint.unlike",
            )
        if not converts(known[name].dtype, value.dtype):
            here = str(value.dtype).removeprefix("torch.")
            raise TrainingError(
                f"{name} is {known[name].dtype} in the checkpoint but {here} in this run",
                where=str(folder),
                fix="resume with the model, optimizer and adapter that the run was started with",
                id="checkpoint.unlike",
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(state, storage_reader=reader, planner=TensorPlanner(), no_dist=alone)
        except CheckpointException as error:
            raise TrainingError(
                f"cannot read the checkpoint: {root_cause(error)}",
                where=str(folder),
                fix="check the disk, or choose another checkpoint from `isles checkpoint list`",
                id="checkpoint.broken",
            ) from error
    return absent


def rng_file(folder: Path, rank: int) -> Path:
    """The path of a rank's random state in a checkpoint."""
    return folder / f"rng-{rank:05d}.safetensors"


def save_readable(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of any new file.

    `save_file` ignores the umask, and only this user could read its files.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def restore_rng(folder: Path, rank: int, *, saved_world_size: int, world_size: int) -> bool:
    """Restore the random state, if the number of ranks is unchanged.

    Returns:
        Whether it was restored. If not, the caller sets a new seed.

    Raises:
        TrainingError: the file does not hold a random state.
    """
    file = rng_file(folder, rank)
    if saved_world_size != world_size or not file.is_file():
        return False
    try:
        state = load_file(file)
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (SafetensorError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise TrainingError(
            f"the random state in {file.name} cannot be used: {root_cause(error)}",
            where=str(folder),
            fix="choose another checkpoint from `isles checkpoint list`",
            id="checkpoint.broken",
        ) from error
    return True

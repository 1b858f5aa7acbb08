"""Load the newest whole checkpoint: copy it to every disk, and read it without a pickle."""

from __future__ import annotations

import logging
import shutil
import stat
import warnings
from collections.abc import Iterator
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
    """The newest checkpoint whose every hash is right; None where there is none at all.

    A broken one is named in the log before an older one is taken.

    Raises:
        TrainingError: there are checkpoints, and none can be gone on with; or the newest is of a
            format that this isles does not read.
    """
    folders = sorted(run_dir.checkpoints.glob("step-*"), reverse=True)
    for folder in folders:
        record = read_record(folder / MANIFEST, MAX_LIST_BYTES) or {}
        if record.get("version", MANIFEST_VERSION) not in READ_VERSIONS:
            read_checkpoint(folder)  # raises, naming the version that wrote it
        issues = verify_checkpoint(folder)
        if not issues:
            return read_checkpoint(folder)
        log.warning("checkpoint %s is broken and left out: %s", folder.name, "; ".join(issues))
    if folders:
        raise TrainingError(
            f"all {len(folders)} checkpoints of this run are broken",
            where=str(run_dir.checkpoints),
            fix="see `isles checkpoint verify`; `--resume no` starts a new run",
            id="checkpoint.broken",
        )
    return None


def sound_checkpoint(folder: Path) -> CheckpointInfo:
    """A checkpoint whose every hash is right.

    Raises:
        TrainingError: one is not.
    """
    if issues := verify_checkpoint(folder):
        raise TrainingError(
            f"this checkpoint is broken: {'; '.join(issues)}",
            where=str(folder),
            fix="take another one from `isles checkpoint list`",
            id="checkpoint.broken",
        )
    return read_checkpoint(folder)


@contextmanager
def on_this_disk(
    checkpoint: CheckpointInfo, run_dir: RunDir, world: World, disks: Disks, progress: Progress
) -> Iterator[Path]:
    """A checkpoint of rank 0 as a folder that this rank can load from. All ranks must call this.

    A node with a disk of its own gets a copy, which is removed when it has been read.

    Args:
        checkpoint: its folder is rank 0's.
        disks: which nodes have a run directory of their own.

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
        log.info("checkpoint=%s travels to ranks=%s", checkpoint.path.name, takers)
        yield folder
        world.gather(None)  # the ranks of a node have all read it
    finally:
        if takes:
            shutil.rmtree(folder, ignore_errors=True)


def refuse_other_run(run_dir: RunDir, world: World, disks: Disks) -> None:
    """Refuse to write parts into a node's own run of the same name. All ranks must call this.

    Raises:
        TrainingError: a node that does not see rank 0's run directory has whole checkpoints in
            its own.
    """
    if not disks.apart_leaders:
        return
    failure = None
    found = sorted(run_dir.checkpoints.glob("step-*")) if world.rank in disks.apart_leaders else []
    if found:
        failure = TrainingError(
            f"this machine has a run of its own under this name, with {found[-1].name}",
            where=f"{run_dir.path}, rank {world.rank} on {world.host}",
            fix=f"to go on with it, name {world.host} as the first host; else set another `name` "
            "or output_dir, or move that folder away",
            id="run.elsewhere",
        )
    raise_first(world.gather(failure))


def load_tensors(state: dict[str, Any], folder: Path, *, alone: bool = False) -> None:
    """Fill the tensors of `state` from a checkpoint, in place, on any number of ranks.

    Args:
        state: tensors (or shards) by name, as an engine's `state_dict` gives them.
        alone: this process loads without the others; otherwise all ranks must call this.

    Raises:
        TrainingError: the checkpoint lacks a tensor, or holds it in another shape, or as numbers of
            another kind.
    """
    reader = TensorReader(folder)
    known = reader.index().tensors
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
                f"{name} has shape {saved} in the checkpoint and {tuple(value.shape)} here",
                where=str(folder),
                fix="resume with the model, tokenizer and adapter that the run was started with",
                id="checkpoint.unlike",
            )
        if not converts(known[name].dtype, value.dtype):
            here = str(value.dtype).removeprefix("torch.")
            raise TrainingError(
                f"{name} is {known[name].dtype} in the checkpoint and {here} here",
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
                f"the checkpoint could not be read: {root_cause(error)}",
                where=str(folder),
                fix="check the disk, or take another one from `isles checkpoint list`",
                id="checkpoint.broken",
            ) from error


def rng_file(folder: Path, rank: int) -> Path:
    """Where a rank's random state lies in a checkpoint."""
    return folder / f"rng-{rank:05d}.safetensors"


def save_readable(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of any new file.

    `save_file` ignores the umask: only this user can read the files that it writes.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def restore_rng(folder: Path, rank: int, *, saved_world_size: int, world_size: int) -> bool:
    """Take the random state back; only where the number of ranks is the same.

    Returns:
        Whether it was restored; otherwise the caller seeds afresh.

    Raises:
        TrainingError: the file holds no random state.
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
            fix="take another checkpoint: `isles checkpoint list`",
            id="checkpoint.broken",
        ) from error
    return True

"""Checkpoints of nodes that have disks of their own: gathered at rank 0, and sent to be loaded.

Every checkpoint is whole at rank 0 and nowhere else. A node that does not see rank 0's run
directory writes its parts into its own and sends them; to load, it gets a copy of the whole.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isles.checkpoint.store import disk_fault
from isles.dist.files import Disks, Progress, broadcast_folder, gather_folder
from isles.dist.world import World, raise_first
from isles.errors import TrainingError
from isles.run.manifest import PARTIAL_PREFIX, CheckpointInfo
from isles.run.paths import RunDir

log = logging.getLogger(__name__)


class Travel:
    """The way of a run's checkpoints between the disks of its nodes.

    Where all nodes see rank 0's run directory, every method does nothing.

    Args:
        run_dir: as this rank knows it.
        world: the ranks.
        disks: theirs.
    """

    def __init__(self, run_dir: RunDir, world: World, disks: Disks) -> None:
        self._run_dir = run_dir
        self._world = world
        self.disks = disks
        self._is_keeper = world.rank in disks.apart_leaders

    def staging(self, partial: Path) -> Path:
        """Where this rank writes its part of a checkpoint that rank 0 writes at `partial`."""
        if not self.disks.is_apart[self._world.rank]:
            return partial
        return partial.with_name(f"{partial.name}-{self.disks.keeper(self._world.rank)}")

    def clean(self) -> None:
        """Remove what killed saves left on a disk of its own, before the first save."""
        if self._is_keeper and self._run_dir.checkpoints.is_dir():
            for folder in self._run_dir.checkpoints.glob(f"{PARTIAL_PREFIX}*"):
                shutil.rmtree(folder, ignore_errors=True)

    def prepare(self, partial: Path) -> None:
        """Make the folders that `staging` names. All ranks must call this.

        Raises:
            TrainingError: a disk does not take them; on every rank.
        """
        if not self.disks.apart_leaders:
            return
        fault = None
        if self._is_keeper:
            staging = self.staging(partial)
            try:
                shutil.rmtree(staging, ignore_errors=True)
                staging.parent.mkdir(exist_ok=True)
                staging.mkdir()
            except OSError as error:
                fault = disk_fault(error, self._run_dir.path, self._world.rank)
        raise_first(self._world.gather(fault))

    def gather(self, partial: Path, progress: Progress) -> None:
        """Bring the parts of all nodes to rank 0. All ranks must call this, in the writer.

        Raises:
            TrainingError: a disk fails, or a part has changed on its way; on every rank.
        """
        if self.disks.apart_leaders:
            gather_folder(
                self.staging(partial),
                self._world,
                sends=self._is_keeper,
                group=self._world.saving,
                progress=progress,
            )

    def discard(self, partial: Path) -> None:
        """Remove this node's parts: rank 0 has them, or the save has failed."""
        if self._is_keeper:
            shutil.rmtree(self.staging(partial), ignore_errors=True)

    @contextmanager
    def brought(self, checkpoint: CheckpointInfo, progress: Progress) -> Iterator[Path]:
        """A checkpoint of rank 0 as a folder that this rank can load from. All must call this.

        A node with a disk of its own gets a copy, which is removed when it has been read.

        Args:
            checkpoint: its folder is rank 0's.
            progress: told how far it is.

        Raises:
            TrainingError: a disk fails or is too small, or a file has changed; on every rank.
        """
        if not self.disks.apart_leaders:
            yield checkpoint.path
            return
        folder = checkpoint.path
        if self.disks.is_apart[self._world.rank]:
            keeper = self.disks.keeper(self._world.rank)
            folder = self._run_dir.checkpoints / f"{PARTIAL_PREFIX}loading-{keeper}"
        files = {name: facts["sha256"] for name, facts in checkpoint.manifest["files"].items()}
        try:
            takers = broadcast_folder(
                folder, self._world, src=0, needs=self._is_keeper, files=files, progress=progress
            )
            log.info("checkpoint=%s travels to ranks=%s", checkpoint.path.name, takers)
            yield folder
            self._world.gather(None)  # the ranks of a node have all read it
        finally:
            if self._is_keeper:
                shutil.rmtree(folder, ignore_errors=True)


def refuse_other_run(run_dir: RunDir, world: World, disks: Disks) -> None:
    """Refuse to use a node's own run of the same name as a place for parts. All must call this.

    Raises:
        TrainingError: a node that does not see rank 0's run directory has whole checkpoints in
            its own.
    """
    if not disks.apart_leaders:
        return
    fault = None
    found = sorted(run_dir.checkpoints.glob("step-*")) if world.rank in disks.apart_leaders else []
    if found:
        fault = TrainingError(
            f"this machine has a run of its own under this name, with {found[-1].name}",
            where=f"{run_dir.path}, rank {world.rank} on {world.host}",
            fix=f"to go on with it, name {world.host} as the first host; else set another `name` "
            "or output_dir, or move that folder away",
            id="run.elsewhere",
        )
    raise_first(world.gather(fault))

"""Checkpoints of nodes that have disks of their own: brought together at rank 0, and back again.

Every checkpoint is whole at rank 0, the head, and nowhere else. A node that does not see the head's
run directory writes its parts beside its own, and sends them; once the checkpoint stands, it keeps
them until the next one stands: what it would have to read again need not travel.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isles.checkpoint.rng import rng_file
from isles.checkpoint.store import disk_fault, parts_needed
from isles.dist.disks import Disks
from isles.dist.transfers import Span, Transfer, joined, raise_first, send_files, whole
from isles.dist.world import World
from isles.errors import TrainingError, UserError
from isles.run.manifest import PARTIAL_PREFIX, CheckpointInfo, hash_file
from isles.run.paths import RunDir

log = logging.getLogger(__name__)

_INDEX = ".metadata"
_KEPT_PREFIX = ".kept-"

_Parts = dict[str, set[Span]]
"""Of each file the parts that are needed."""

Progress = Callable[[int, int], None]
"""Called with the bytes that have been sent, and all of them."""


class Travel:
    """The way of a run's checkpoints between the disks of its nodes.

    Where all nodes see the head's run directory, every method does nothing.

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
        """Where this rank writes its part of a checkpoint that the head writes at `partial`."""
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
        """Bring the parts of all nodes to the head. All ranks must call this, in the writer.

        Raises:
            TrainingError: a disk fails, or a part has changed on its way; on every rank.
        """
        if not self.disks.apart_leaders:
            return
        group, staging = self._world.saving, self.staging(partial)
        mine: list[tuple[str, int]] = []
        if self._is_keeper:
            mine = [(file.name, file.stat().st_size) for file in sorted(staging.iterdir())]
        transfers = [
            Transfer(name, whole(size), sender, (0,))
            for sender, files in enumerate(self._world.gather(mine, group=group))
            for name, size in files
        ]
        send_files(transfers, staging, self._world, group, progress=progress)

    def settle(self, partial: Path, name: str) -> None:
        """The checkpoint stands at the head: keep this node's parts in place of older ones."""
        if not self._is_keeper:
            return
        staging, kept = self.staging(partial), self._kept(name)
        self.drop(but=name)  # another node that shares this disk may have kept its own already
        try:
            staging.replace(kept)
        except OSError as error:  # nothing is lost: they will travel
            log.warning("kept=%s not kept: %s", kept, error)
            shutil.rmtree(staging, ignore_errors=True)

    def give_up(self, partial: Path) -> None:
        """The save has failed: remove this node's parts."""
        if self._is_keeper:
            shutil.rmtree(self.staging(partial), ignore_errors=True)

    def drop(self, but: str | None = None) -> None:
        """Remove what is kept of the last checkpoint; with `but` of all others than this one."""
        if self._is_keeper and self._run_dir.checkpoints.is_dir():
            for folder in self._run_dir.checkpoints.glob(f"{_KEPT_PREFIX}*"):
                if but is None or not folder.name.startswith(f"{_KEPT_PREFIX}{but}-"):
                    shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def brought(
        self, checkpoint: CheckpointInfo, state: dict[str, Any], progress: Progress
    ) -> Iterator[Path]:
        """A checkpoint of the head as a folder that this rank can load from. All must call this.

        A node with a disk of its own gets what its ranks will read, less the files that it has
        kept; it is removed when it has been read.

        Args:
            checkpoint: its folder is the head's.
            state: what is loaded, as for `load_tensors`.
            progress: told how far it is.

        Raises:
            TrainingError: a disk fails or is too small, a file has changed on its way, or the
                checkpoint does not fit; on every rank.
        """
        if not self.disks.apart_leaders:
            yield checkpoint.path
            return
        folder = checkpoint.path
        if self.disks.is_apart[self._world.rank]:
            keeper = self.disks.keeper(self._world.rank)
            folder = self._run_dir.checkpoints / f"{PARTIAL_PREFIX}loading-{keeper}"
            if self._is_keeper:
                shutil.rmtree(folder, ignore_errors=True)
        try:
            self._fetch(checkpoint, self._small_files(checkpoint), folder, progress)
            self._fetch(checkpoint, self._needed(state, folder), folder, progress)
            yield folder
            self._world.gather(None)  # the ranks of a node have all read it
        finally:
            if self._is_keeper:
                shutil.rmtree(folder, ignore_errors=True)

    def _small_files(self, checkpoint: CheckpointInfo) -> _Parts:
        """The index, and this rank's random state."""
        if not self.disks.is_apart[self._world.rank]:
            return {}
        files = checkpoint.manifest["files"]
        names = {_INDEX, rng_file(checkpoint.path, self._world.rank).name} & set(files)
        return {name: set(whole(int(files[name]["size"]))) for name in names}

    def _needed(self, state: dict[str, Any], folder: Path) -> _Parts:
        """What this rank will read; all ranks look, for all of them may find a fault."""
        needed: _Parts = {}
        fault: UserError | None = None
        try:
            needed = parts_needed(state, folder)
        except UserError as error:
            fault = error
        raise_first(self._world.gather(fault, group=self._world.work))
        return needed if self.disks.is_apart[self._world.rank] else {}

    def _fetch(
        self, checkpoint: CheckpointInfo, mine: _Parts, folder: Path, progress: Progress
    ) -> None:
        """Bring parts of a checkpoint to the nodes whose ranks need them. All must call this."""
        world, files = self._world, checkpoint.manifest["files"]
        wanted: dict[int, _Parts] = {leader: {} for leader in self.disks.apart_leaders}
        for rank, needed in enumerate(world.gather(mine, group=world.work)):
            for name, parts in needed.items():
                wanted[self.disks.keeper(rank)].setdefault(name, set()).update(parts)
        has: set[str] = set()
        if self._is_keeper:
            has = self._take_kept(checkpoint, set(wanted[world.rank]), folder)
        takers: dict[tuple[str, tuple[Span, ...]], list[int]] = {}
        for rank, found in enumerate(world.gather(has, group=world.work)):
            for name, parts in wanted.get(rank, {}).items():
                if name not in found:
                    takers.setdefault((name, joined(parts)), []).append(rank)
        transfers = []
        for (name, spans), ranks in sorted(takers.items()):
            is_whole = spans == whole(int(files[name]["size"]))
            sha256 = str(files[name]["sha256"]) if is_whole else None
            transfers.append(Transfer(name, spans, 0, tuple(ranks), sha256))
        if transfers:
            size = sum(transfer.size_bytes * len(transfer.takers) for transfer in transfers)
            log.info("checkpoint=%s travels bytes=%d", checkpoint.path.name, size)
        send_files(transfers, folder, world, world.work, progress=progress)

    def _take_kept(self, checkpoint: CheckpointInfo, names: set[str], folder: Path) -> set[str]:
        """Link what this node has kept of a checkpoint, and is as it was, into the folder."""
        has: set[str] = set()
        # Of whichever rank that kept it: ranks may have other numbers now.
        for file in self._run_dir.checkpoints.glob(f"{_KEPT_PREFIX}{checkpoint.path.name}-*/*"):
            expected = checkpoint.manifest["files"].get(file.name)
            if file.name not in names - has or expected is None:
                continue
            try:
                if (
                    file.stat().st_size == expected["size"]
                    and hash_file(file) == expected["sha256"]
                ):
                    folder.mkdir(exist_ok=True)
                    (folder / file.name).hardlink_to(file)
                    has.add(file.name)
            except OSError:
                continue  # it travels
        return has

    def _kept(self, name: str) -> Path:
        return self._run_dir.checkpoints / f"{_KEPT_PREFIX}{name}-{self._world.rank}"


def refuse_other_run(run_dir: RunDir, world: World, disks: Disks) -> None:
    """Refuse to use a node's own run of the same name as a place for parts. All must call this.

    Raises:
        TrainingError: a node that does not see the head's run directory has whole checkpoints in
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

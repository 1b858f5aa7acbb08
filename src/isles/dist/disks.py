"""Which nodes see the run directory of rank 0, and which have a disk of their own."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from isles.dist.place import Place, place_of
from isles.dist.transfers import Transfer, raise_first, send_files, whole
from isles.dist.world import World
from isles.errors import TrainingError, UserError
from isles.run.manifest import PARTIAL_PREFIX, hash_file

_LOOK_S, _LOOK_EVERY_S = 5.0, 0.05
"""A file system of the network may show a new file a moment later than it was written."""

_SHOW_S = 60.0
"""Longest wait until a disk shows what another host that shares it has written there."""

_LOCAL = frozenset(
    (
        *("apfs", "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs"),
        *("ntfs", "ntfs3", "overlay", "ramfs", "tmpfs", "vfat", "xfs", "zfs"),
    )
)
"""File systems of one machine: one look is enough there."""


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks of a world: that of rank 0, and those of nodes that do not see it.

    Args:
        places: of every rank, by rank.
        is_apart: by rank, whether its node has a run directory of its own.
    """

    places: tuple[Place, ...]
    is_apart: tuple[bool, ...]

    @property
    def apart_leaders(self) -> tuple[int, ...]:
        """The first rank of each node that has a run directory of its own."""
        ranks = range(len(self.places))
        return tuple(r for r in ranks if self.is_apart[r] and self.places[r].is_leader)

    @property
    def apart_names(self) -> str:
        """These nodes, for messages."""
        return ", ".join(str(self.places[rank]) for rank in self.apart_leaders)

    def keeper(self, rank: int) -> int:
        """The rank that acts for the disk of another: 0, or the first of its node."""
        return self.places[rank].leader if self.is_apart[rank] else 0


def find_disks(world: World, folder: Path) -> Disks:
    """Find out who sees rank 0's folder. All ranks must call this.

    Rank 0 writes a file with a random word, under a name that was never there; the first rank of
    every other node looks for it.

    Args:
        world: the ranks.
        folder: the run directory, as this rank knows it.

    Raises:
        TrainingError: rank 0 cannot write there.
    """
    me = place_of(world)
    word = uuid.uuid4().hex
    probe = folder / f".probe-{word[:8]}"

    def write() -> tuple[str, str]:
        try:
            probe.write_text(word, encoding="ascii")
        except OSError as error:
            raise _disk_fault(error, folder, world) from error
        return probe.name, word

    name, word = world.main_first(write)
    try:
        sees = world.rank == 0 or (me.is_leader and _sees_any([(folder / name, word)]))
        found = world.gather((me, sees))
    finally:
        if world.is_main:
            with contextlib.suppress(OSError):
                probe.unlink()
    places = tuple(place for place, _ in found)
    seen = [sees for _, sees in found]
    return Disks(places, tuple(not seen[place.leader] for place in places))


def spread_folder(
    folder: Path,
    sender: int,
    world: World,
    disks: Disks,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Give every disk the folder that one of them has. All ranks must call this.

    Args:
        folder: where it lies, as this rank knows it; what other disks have there is replaced.
        sender: a rank on whose disk it is.
        world: the ranks.
        disks: theirs.
        progress: as for `send_files`.

    Raises:
        UserError: it cannot be read, or a disk cannot take it.
    """
    keepers = sorted({0, *disks.apart_leaders})
    if len(keepers) == 1:
        return
    mine: dict[str, tuple[int, str]] = {}
    fault: UserError | None = None
    try:
        mine = _contents(folder) if world.rank in (sender, *keepers) else {}
    except OSError as error:
        fault = _disk_fault(error, folder, world)
    found = world.gather((mine, fault), group=world.work)
    raise_first([other for _, other in found])
    wanted = found[sender][0]
    source = disks.keeper(sender)
    takers = tuple(r for r in keepers if r != source and found[r][0] != wanted)
    if not takers or not wanted:
        return
    lacks = world.rank in takers
    if len(takers) > 1:
        takers = _one_for_each_disk(takers, folder, world)
    transfers = [
        Transfer(name, whole(size), sender, takers, sha256)
        for name, (size, sha256) in wanted.items()
    ]
    partial = folder.with_name(f"{PARTIAL_PREFIX}{folder.name}-{world.rank}")
    takes = world.rank in takers
    if takes:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        send_files(transfers, partial if takes else folder, world, world.work, progress=progress)
        raise_first(world.gather(_publish(partial, folder, world) if takes else None))
        # The other ranks of a node read it from now on.
        missed = _await_files(folder, wanted, world) if lacks and not takes else None
        raise_first(world.gather(missed, group=world.work))
    finally:
        if takes:
            shutil.rmtree(partial, ignore_errors=True)


def _one_for_each_disk(takers: tuple[int, ...], folder: Path, world: World) -> tuple[int, ...]:
    """Of takers that share a disk which the head does not see, the first alone takes.

    All ranks must call this.
    """
    word = uuid.uuid4().hex
    probe = folder.with_name(f".probe-{word[:8]}")
    fault: UserError | None = None
    if world.rank in takers:
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_text(word, encoding="ascii")
        except OSError as error:
            fault = _disk_fault(error, folder, world)
    try:
        found = world.gather((probe.name, word, fault))
        raise_first([other for _, _, other in found])
        is_second = False
        if world.rank in takers:
            before = [found[rank] for rank in takers if rank < world.rank]
            is_second = _sees_any([(probe.with_name(name), said) for name, said, _ in before])
        second = world.gather(is_second)
    finally:
        if world.rank in takers:
            with contextlib.suppress(OSError):
                probe.unlink()
    return tuple(rank for rank in takers if not second[rank])


def _await_files(
    folder: Path, wanted: dict[str, tuple[int, str]], world: World
) -> TrainingError | None:
    """Wait until this host sees what another one has written on the disk that they share."""
    end = time.monotonic() + _SHOW_S
    while True:
        lacks = [name for name, (size, _) in wanted.items() if _size(folder / name) != size]
        if not lacks:
            return None
        if time.monotonic() > end:
            return TrainingError(
                f"{lacks[0]} does not show here {_SHOW_S:.0f} s after another host wrote it on "
                "this disk, which they share",
                where=f"{folder}, rank {world.rank} on {world.host}",
                fix="look after the network and the server of this file system",
                id="files.shared",
            )
        time.sleep(_LOOK_EVERY_S)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _publish(partial: Path, folder: Path, world: World) -> UserError | None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
    except OSError as error:
        return _disk_fault(error, folder, world)
    return None


def _disk_fault(error: OSError, folder: Path, world: World) -> TrainingError:
    return TrainingError(
        f"this disk fails: {error.strerror or error}",
        where=f"{folder}, rank {world.rank} on {world.host}",
        fix="free some space there, look after the disk (dmesg), or set another output_dir",
        id="checkpoint.unsaved",
    )


def _contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and hash of every file, by its name within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, hash_file(path))
        for path in files
    }


def _sees_any(probes: Sequence[tuple[Path, str]]) -> bool:
    """Whether one of these files, all in one folder, is there and says its word."""
    if not probes:
        return False
    is_local = _kind(probes[0][0].parent) in _LOCAL
    end = time.monotonic() + (0 if is_local else _LOOK_S)
    while True:
        for probe, word in probes:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if probe.read_text(encoding="ascii") == word:
                    return True
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_EVERY_S)


def _kind(folder: Path) -> str:
    """The kind of file system that a folder is on; "" where it is not known."""
    mounts: Sequence[tuple[str, str]] = [
        (str(part.mountpoint), str(part.fstype)) for part in psutil.disk_partitions(all=True)
    ]
    path = folder.absolute()
    best = max(
        (mount for mount in mounts if path.is_relative_to(mount[0])),
        key=lambda mount: len(mount[0]),
        default=("", ""),
    )
    return best[1].lower()

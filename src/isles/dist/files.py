"""Files across disks: which nodes see a folder of rank 0, and copies for those that do not.

Files go from one rank to others piece by piece, in bounded memory, and are compared by SHA-256. A
folder that is brought is written beside its place and gets its name once it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch
import torch.distributed as dist

from isles.dist.world import Place, World, place_of, raise_first
from isles.errors import TrainingError, UserError
from isles.facts.units import format_bytes
from isles.run.checkpoints import PARTIAL_PREFIX, hash_file, sync_folder

PIECE_BYTES = 4 * 2**20
"""Sent at once: even a link of 1 Mbit/s takes half a minute, far below every time-out."""

_PIECES_TOGETHER = 4
"""After so many pieces all ranks exchange failures: none waits long for others that still send."""

_SPARE_BYTES = 2**16
"""Left free on a disk that takes files."""

_PUBLISHES = 3
"""Attempts to give a folder its name."""

_LOOK_S, _LOOK_EVERY_S = 5.0, 0.05
"""A file system of the network may show a new file a moment later than it was written."""

_LOCAL = frozenset(
    (
        *("apfs", "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs"),
        *("ntfs", "ntfs3", "overlay", "ramfs", "tmpfs", "vfat", "xfs", "zfs"),
    )
)
"""File systems of one machine: one look is enough there."""

Progress = Callable[[int, int], None]
"""Called with the bytes that have been sent, and all of them."""


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
            raise _disk_failure(error, "", folder, world) from error
        return probe.name, word

    name, word = world.main_first(write)
    try:
        sees = world.rank == 0 or (me.is_leader and _sees(folder / name, word))
        found = world.gather((me, sees))
    finally:
        if world.is_main:
            with contextlib.suppress(OSError):
                probe.unlink()
    places = tuple(place for place, _ in found)
    seen = [sees for _, sees in found]
    return Disks(places, tuple(not seen[place.leader] for place in places))


def broadcast_folder(
    folder: Path,
    world: World,
    *,
    src: int,
    needs: bool,
    files: Mapping[str, str] | None = None,
    progress: Progress = lambda done, total: None,
) -> list[int]:
    """Copy a folder from one rank's disk to disks that lack it. All ranks must call this.

    Args:
        folder: where it lies, as this rank knows it.
        world: the ranks.
        src: a rank on whose disk it is whole.
        needs: whether this rank writes it to its disk, unless what is there is the same. Ranks
            that do not know that they share a disk may both do so.
        files: at `src`, the names of the files that are sent, and their SHA-256; None: all.
        progress: called on every rank.

    Returns:
        The ranks to which it was sent.

    Raises:
        TrainingError: a file cannot be read or written, a disk is too small, or a file has changed;
            the same error on every rank.
    """

    def look() -> dict[str, tuple[int, str]]:
        try:
            hashes = files or {name: hash_file(folder / name) for name in _names(folder)}
            return {name: ((folder / name).stat().st_size, h) for name, h in hashes.items()}
        except OSError as error:
            raise _disk_failure(error, "", folder, world) from error

    wanted = world.main_first(look, group=world.work, rank=src)
    lacks = world.gather(needs and not _holds(folder, wanted), group=world.work)
    takers = tuple(rank for rank, lacking in enumerate(lacks) if lacking)
    if not takers:
        return []
    mine = world.rank in takers
    partial = folder.with_name(f"{PARTIAL_PREFIX}{folder.name}-{world.rank}")
    transfers = [_Transfer(n, size, src, takers, sha256) for n, (size, sha256) in wanted.items()]
    try:
        if mine:
            shutil.rmtree(partial, ignore_errors=True)
        _send(transfers, partial if mine else folder, world, world.work, progress)
        failure = _publish(partial, folder, wanted, world) if mine else None
        raise_first(world.gather(failure, group=world.work))
    finally:
        if mine:
            shutil.rmtree(partial, ignore_errors=True)
    return list(takers)


def gather_folder(
    folder: Path,
    world: World,
    *,
    sends: bool,
    group: dist.ProcessGroup,
    progress: Progress = lambda done, total: None,
) -> None:
    """Bring the files of some ranks' folders into that of rank 0. All ranks must call this.

    Args:
        folder: this rank's; it has no folders within.
        world: the ranks.
        sends: whether this rank, which is not 0, sends its files.
        group: a CPU group of all ranks, over which nothing else is sent meanwhile.
        progress: called on every rank.

    Raises:
        TrainingError: as `broadcast_folder`.
    """
    mine = [(name, (folder / name).stat().st_size) for name in _names(folder)] if sends else []
    transfers = [
        _Transfer(name, size, sender, (0,))
        for sender, files in enumerate(world.gather(mine, group=group))
        for name, size in files
    ]
    _send(transfers, folder, world, group, progress)


@dataclass(frozen=True, slots=True)
class _Transfer:
    name: str  # in the folder of each end
    size_bytes: int
    sender: int
    takers: tuple[int, ...]
    sha256: str = ""  # "": as the sender reads it


def _send(
    transfers: Sequence[_Transfer],
    folder: Path,
    world: World,
    group: dist.ProcessGroup,
    progress: Progress,
) -> None:
    # Copy files from disk to disk, one after another. All ranks must call this.
    end = _End(folder, world)
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    timeout = timedelta(seconds=world.timeout_s)
    total, done, pieces = sum(transfer.size_bytes for transfer in transfers), 0, 0
    digests: list[str] = []
    end.guard(end.check_space, sum(t.size_bytes for t in transfers if world.rank in t.takers))
    for transfer in transfers:
        sends, takes = world.rank == transfer.sender, world.rank in transfer.takers
        if sends or takes:
            end.guard(end.open, transfer.name, "rb" if sends else "wb")
        for start in range(0, transfer.size_bytes, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, transfer.size_bytes - start)]
            if sends:
                end.guard(end.read, piece)
                works = [dist.isend(piece, taker, group) for taker in transfer.takers]
            elif takes:
                works = [dist.irecv(piece, transfer.sender, group)]
            else:
                works = []
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait(timeout)
            if takes:
                end.guard(end.write, piece)
            done, pieces = done + len(piece), pieces + 1
            if pieces % _PIECES_TOGETHER == 0:
                raise_first(world.gather(end.failure, group=group))
                progress(done, total)
        end.guard(end.close)
        digests.append(end.digest if sends or takes else "")
    raise_first(world.gather(end.failure, group=group))
    read = world.gather(digests, group=group)
    for number, transfer in enumerate(transfers):
        sent = read[transfer.sender][number]
        if world.rank in transfer.takers and digests[number] != (transfer.sha256 or sent):
            end.guard(end.refuse, transfer, sent == digests[number])
    raise_first(world.gather(end.failure, group=group))


class _End:
    # One rank's end of transfers: the file that is read or written, and the first failure. A disk
    # that fails does not break the exchange, or the others would only see a lost rank.

    def __init__(self, folder: Path, world: World) -> None:
        self.failure: UserError | None = None
        self._folder, self._world = folder, world
        self._name = ""
        self._stream = io.FileIO(os.devnull)
        self._hash = hashlib.sha256()

    def guard(self, action: Callable[..., None], *args: Any) -> None:
        """Call an action unless one has failed before, and keep its failure."""
        if self.failure is not None:
            return
        try:
            action(*args)
        except UserError as error:
            self.failure = error
        except OSError as error:
            self.failure = _disk_failure(error, self._name, self._folder, self._world)

    def check_space(self, wanted_bytes: int) -> None:
        if not wanted_bytes:
            return
        # No folder further up: a deleted run directory must not come back.
        self._folder.parent.mkdir(exist_ok=True)
        self._folder.mkdir(exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        if free < wanted_bytes + _SPARE_BYTES:
            raise TrainingError(
                f"{format_bytes(wanted_bytes)} have to be brought to this disk, "
                f"{format_bytes(free)} are free on it",
                where=self._where(),
                fix="free some space there, or set another output_dir",
                id="disk.free",
            )

    def open(self, name: str, mode: str) -> None:
        assert not name.startswith("/") and ".." not in PurePosixPath(name).parts, name
        self._name, self._hash = name, hashlib.sha256()
        path = self._folder / name
        if mode == "wb":
            path.parent.mkdir(exist_ok=True)
        self._stream = io.FileIO(path, mode)

    def read(self, piece: torch.Tensor) -> None:
        view = piece.numpy().data
        while view:
            count = self._stream.readinto(view)
            if not count:
                raise OSError(None, "it has become shorter while it was sent")
            view = view[count:]
        self._hash.update(piece.numpy().data)

    def write(self, piece: torch.Tensor) -> None:
        view = piece.numpy().data
        self._hash.update(view)
        while view:  # a disk that is nearly full takes a part
            view = view[self._stream.write(view) :]

    def close(self) -> None:
        if not self._stream.closed:
            with self._stream:
                if self._stream.writable():
                    os.fsync(self._stream.fileno())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def refuse(self, transfer: _Transfer, is_sent_so: bool) -> None:
        when = "on the disk that it was read from" if is_sent_so else "on its way"
        raise TrainingError(
            f"{transfer.name} has changed {when}: its SHA-256 is not that of what was to be sent",
            where=f"{self._where()}, sent by rank {transfer.sender}",
            fix="start again; if it comes again, look after the network card, the memory and the "
            "disk of both machines, and remove what can be made anew there",
            id="checkpoint.broken",
        )

    def _where(self) -> str:
        return f"{self._folder}, rank {self._world.rank} on {self._world.host}"


def _publish(
    partial: Path, folder: Path, wanted: Mapping[str, tuple[int, str]], world: World
) -> UserError | None:
    # Give the copy its name, unless another host that shares this disk did so first.
    old = partial.with_name(f"{partial.name}-old")
    failure: OSError | None = None
    for _ in range(_PUBLISHES):
        if _holds(folder, wanted):
            return None
        try:
            sync_folder(partial)
            with contextlib.suppress(FileNotFoundError):
                folder.replace(old)
            partial.replace(folder)
        except OSError as error:  # the other host may do the same at this moment
            failure = error
        else:
            return None
        finally:
            shutil.rmtree(old, ignore_errors=True)
    assert failure is not None
    return _disk_failure(failure, "", folder, world)


def _names(folder: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in files]


def _holds(folder: Path, wanted: Mapping[str, tuple[int, str]]) -> bool:
    try:
        return _names(folder) == sorted(wanted) and all(
            (folder / name).stat().st_size == size and hash_file(folder / name) == sha256
            for name, (size, sha256) in wanted.items()
        )
    except OSError:
        return False


def _disk_failure(error: OSError, name: str, folder: Path, world: World) -> TrainingError:
    free = ""
    with contextlib.suppress(OSError):
        free = f"; {format_bytes(shutil.disk_usage(folder).free)} are free there"
    return TrainingError(
        f"this disk fails: {name or error.filename or folder}: {error.strerror or error}{free}",
        where=f"{folder}, rank {world.rank} on {world.host}",
        fix="free some space there, look after the disk (dmesg), or set another output_dir",
        id="checkpoint.unsaved",
    )


def _sees(probe: Path, word: str) -> bool:
    end = time.monotonic() + (0 if _kind(probe.parent) in _LOCAL else _LOOK_S)
    while True:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if probe.read_text(encoding="ascii") == word:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_EVERY_S)


def _kind(folder: Path) -> str:
    # Of the file system that a folder is on; "" where it is not known.
    path = folder.absolute()
    mounts = [
        part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)
    ]
    best = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return "" if best is None else str(best.fstype).lower()

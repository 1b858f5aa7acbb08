"""Files across disks: find the nodes that see rank 0's folder, and copy folders to the other nodes.

Files are sent in pieces, in bounded memory, and compared by SHA-256. A folder is written under a
temporary name next to its final path, and renamed when it is complete.
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
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from isles.dist.world import RankLocation, World, place_of, raise_first
from isles.errors import TrainingError, UserError
from isles.facts.units import format_bytes
from isles.run.checkpoints import PARTIAL_PREFIX, hash_file, sync_folder
from isles.run.entry import make_own_folder, open_own_file

PIECE_BYTES = 4 * 2**20
"""Size of one message: takes half a minute on a link of 1 Mbit/s, far below every timeout."""

_PIECES_TOGETHER = 4
"""Number of pieces after which all ranks exchange failures, so that none waits long for a sender.
"""

_LOOK_S, _LOOK_EVERY_S = 1.0, 0.05
"""Seconds to wait: a network file system may show a new file a moment after it was written."""

Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and the total."""


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks of a world: rank 0's disk, and the disks of nodes that do not see it.

    Args:
        places: of every rank, by rank.
        is_apart: by rank, whether its node has a separate run directory.
    """

    places: tuple[RankLocation, ...]
    is_apart: tuple[bool, ...]

    @property
    def apart_leaders(self) -> tuple[int, ...]:
        """The first rank of each node with a separate run directory."""
        ranks = range(len(self.places))
        return tuple(r for r in ranks if self.is_apart[r] and self.places[r].is_leader)

    @property
    def apart_names(self) -> str:
        """Names of these nodes, for messages."""
        return ", ".join(str(self.places[rank]) for rank in self.apart_leaders)

    def keeper(self, rank: int) -> int:
        """The rank that writes to the disk of `rank`: 0, or the first rank of its node."""
        return self.places[rank].leader if self.is_apart[rank] else 0


def find_disks(world: World, folder: Path) -> Disks:
    """Find out which nodes see rank 0's folder. All ranks must call this.

    Rank 0 writes a file with a random content and a random name; the first rank of every other node
    looks for it.

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
        found = world.gather((me, me.is_leader and _sees(folder / name, word)))
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
        folder: path of the folder on this rank.
        src: a rank whose disk has the complete folder.
        needs: whether this rank writes the folder to its disk, unless the same content exists.
            Several
            ranks may do so without knowing that they share a disk.
        files: at `src`, names and SHA-256 of the files to send; None: all files.

    Returns:
        The ranks that received it.

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
    # Two users of a shared cache may receive the same tokens at the same time.
    partial = folder.with_name(f"{PARTIAL_PREFIX}{folder.name}-{os.geteuid()}-{world.rank}")
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
    """Copy the files of some ranks' folders to rank 0's folder. All ranks must call this.

    Args:
        folder: this rank's folder, without subfolders.
        sends: whether this rank, which is not 0, sends its files.
        group: a CPU group of all ranks; nothing else may use it during the copy.

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
    name: str  # in the sender's and the receiver's folder
    size_bytes: int
    sender: int
    takers: tuple[int, ...]
    sha256: str = ""  # "": computed by the sender


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
    total, done = sum(transfer.size_bytes for transfer in transfers), 0
    for transfer in transfers:
        sends, takes = world.rank == transfer.sender, world.rank in transfer.takers
        if sends or takes:
            end.guard(end.open, transfer.name, "rb" if sends else "wb")
        for number, start in enumerate(range(0, transfer.size_bytes, PIECE_BYTES), 1):
            piece = buffer[: min(PIECE_BYTES, transfer.size_bytes - start)]
            works: list[dist.Work | None] = []
            if sends:
                end.guard(end.read, piece)
                # To all receivers at once. `piece` is reused, so the loop waits before it reads the
                # next one.
                works = [dist.isend(piece, taker, group) for taker in transfer.takers]
            elif takes:
                works = [dist.irecv(piece, transfer.sender, group)]
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait(timeout)
            if takes:
                end.guard(end.write, piece)
            done += len(piece)
            if number % _PIECES_TOGETHER == 0:
                raise_first(world.gather(end.failure, group=group))
                progress(done, total)
        end.guard(end.close)
        sent = world.gather(end.digest, group=group)[transfer.sender]
        if takes and end.digest != (transfer.sha256 or sent):
            end.guard(end.refuse, transfer)
    raise_first(world.gather(end.failure, group=group))


class _End:
    # One rank's end of transfers: the open file, and the first failure. A failing disk does not
    # break the exchange, because the other ranks would only see a lost rank.

    def __init__(self, folder: Path, world: World) -> None:
        self.failure: UserError | None = None
        self._folder, self._world = folder, world
        self._name = ""
        self._stream: Any = None
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def guard(self, action: Callable[..., None], *args: Any) -> None:
        # Call an action unless an earlier one failed, and keep its failure.
        if self.failure is not None:
            return
        try:
            action(*args)
        except UserError as error:
            self.failure = error
        except OSError as error:
            self.failure = _disk_failure(error, self._name, self._folder, self._world)

    def open(self, name: str, mode: str) -> None:
        if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise TrainingError(
                f"{ascii(name)[:80]} is not a valid file name",
                where=f"{self._folder}, rank {self._world.rank} on {self._world.host}",
                fix="use another checkpoint; `isles checkpoint list` shows them",
                id="checkpoint.broken",
            )
        self._name, self._hash = name, hashlib.sha256()
        path = self._folder / name
        if mode == "wb":
            # Creates no parent folders: a deleted run directory must not come back.
            self._folder.parent.mkdir(exist_ok=True)
            # Other users may write to the folder above, such as a shared data.cache_dir.
            for folder in (self._folder, path.parent):
                make_own_folder(folder)
            raw = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._stream = io.BufferedWriter(cast("io.RawIOBase", raw))  # raw writes may be short
        else:
            self._stream = path.open(mode)

    def read(self, piece: torch.Tensor) -> None:
        if self._stream.readinto(piece.numpy()) < len(piece):
            raise OSError(None, "the file became shorter while it was sent")
        self._hash.update(piece.numpy().data)

    def write(self, piece: torch.Tensor) -> None:
        self._hash.update(piece.numpy().data)
        self._stream.write(piece.numpy())

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with stream:
                if stream.writable():
                    stream.flush()
                    os.fsync(stream.fileno())

    def refuse(self, transfer: _Transfer) -> None:
        raise TrainingError(
            f"{transfer.name} was damaged: its SHA-256 changed on the disk of rank "
            f"{transfer.sender}, or during the transfer",
            where=f"{self._folder}, rank {self._world.rank} on {self._world.host}",
            fix="start again; if the error repeats, test the network adapter, memory and disk of "
            "both machines, and delete files there that can be downloaded or built again",
            id="checkpoint.broken",
        )


def _publish(
    partial: Path, folder: Path, wanted: Mapping[str, tuple[int, str]], world: World
) -> UserError | None:
    # Rename the copy to its final name, unless another host that shares this disk did so first.
    old = partial.with_name(f"{partial.name}-old")
    try:
        sync_folder(partial)
        with contextlib.suppress(FileNotFoundError):
            folder.replace(old)
        partial.replace(folder)
    except OSError as error:  # the other host may do the same at this moment
        return None if _holds(folder, wanted) else _disk_failure(error, "", folder, world)
    finally:
        shutil.rmtree(old, ignore_errors=True)
    return None


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
        free = f"; {format_bytes(shutil.disk_usage(folder).free)} free"
    return TrainingError(
        f"cannot use this disk: {name or error.filename or folder}: "
        f"{error.strerror or error}{free}",
        where=f"{folder}, rank {world.rank} on {world.host}",
        fix="free some space, check the disk (dmesg), or set another output_dir",
        id="checkpoint.unsaved",
    )


def _sees(probe: Path, word: str) -> bool:
    end = time.monotonic() + _LOOK_S
    while True:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if probe.read_text(encoding="ascii") == word:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_EVERY_S)

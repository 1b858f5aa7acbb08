"""Files across disks: which nodes see a folder of rank 0, and copies for those that do not.

Files are sent piece by piece, in bounded memory, and compared by SHA-256. A folder is written
beside its place and gets its name once it is whole.
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

from isles.dist.world import Place, World, place_of, raise_first
from isles.errors import TrainingError, UserError
from isles.facts.units import format_bytes
from isles.run.checkpoints import PARTIAL_PREFIX, hash_file, sync_folder
from isles.run.entry import make_own_folder, open_own_file

PIECE_BYTES = 4 * 2**20
"""Sent at once: even a link of 1 Mbit/s takes half a minute, far below every time-out."""

_PIECES_TOGETHER = 4
"""After so many pieces all ranks exchange failures: none waits long for others that still send."""

_LOOK_S, _LOOK_EVERY_S = 1.0, 0.05
"""A file system of the network may show a new file a moment later than it was written."""

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
        folder: where it lies, as this rank knows it.
        src: a rank on whose disk it is whole.
        needs: whether this rank writes it to its disk, unless what is there is the same. Ranks
            that do not know that they share a disk may both do so.
        files: at `src`, the names of the files that are sent, and their SHA-256; None: all.

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
    """Bring the files of some ranks' folders into that of rank 0. All ranks must call this.

    Args:
        folder: this rank's; it has no folders within.
        sends: whether this rank, which is not 0, sends its files.
        group: a CPU group of all ranks, over which nothing else is sent meanwhile.

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
    # One rank's end of transfers: the file that is read or written, and the first failure. A disk
    # that fails does not break the exchange, or the others would only see a lost rank.

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
        # Call an action unless one has failed before, and keep its failure.
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
                f"{ascii(name)[:80]} is not the name of a file in a folder",
                where=f"{self._folder}, rank {self._world.rank} on {self._world.host}",
                fix="take another checkpoint: `isles checkpoint list`",
                id="checkpoint.broken",
            )
        self._name, self._hash = name, hashlib.sha256()
        path = self._folder / name
        if mode == "wb":
            # No folder further up: a deleted run directory must not come back.
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
            raise OSError(None, "it has become shorter while it was sent")
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
            f"{transfer.name} is not what was to be sent: its SHA-256 has changed on the disk of "
            f"rank {transfer.sender}, or on its way",
            where=f"{self._folder}, rank {self._world.rank} on {self._world.host}",
            fix="start again; if it comes again, look after the network card, the memory and the "
            "disk of both machines, and remove what can be made anew there",
            id="checkpoint.broken",
        )


def _publish(
    partial: Path, folder: Path, wanted: Mapping[str, tuple[int, str]], world: World
) -> UserError | None:
    # Give the copy its name, unless another host that shares this disk did so first.
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
        free = f"; {format_bytes(shutil.disk_usage(folder).free)} are free there"
    return TrainingError(
        f"this disk fails: {name or error.filename or folder}: {error.strerror or error}{free}",
        where=f"{folder}, rank {world.rank} on {world.host}",
        fix="free some space there, look after the disk (dmesg), or set another output_dir",
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

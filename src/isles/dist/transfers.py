"""Files from one rank's disk to others': piece by piece, in bounded memory, verified by hash."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist

from isles.dist.world import World
from isles.errors import TrainingError, UserError
from isles.facts.units import format_bytes

PIECE_BYTES = 4 * 2**20
"""Sent at once: even a link of 1 Mbit/s takes half a minute, far below every time-out."""

_PIECES_TOGETHER = 16
"""After so many pieces all ranks hear how it goes: none waits long for others that still send."""

_SPARE_BYTES = 2**16
"""Left free on a disk that takes files."""


Span = tuple[int, int]
"""A part of a file: where it begins, and how many bytes it has."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One file, or some of its parts, on the way.

    Args:
        name: in the folder of whoever sends it and of whoever takes it.
        spans: its parts, in order; what lies between them is not sent, and is empty there.
        sender: the rank that has it.
        takers: the ranks that get it.
        sha256: of these bytes, where that is known; None: as the sender reads them.
    """

    name: str
    spans: tuple[Span, ...]
    sender: int
    takers: tuple[int, ...]
    sha256: str | None = None

    @property
    def size_bytes(self) -> int:
        """What is sent."""
        return sum(length for _, length in self.spans)


def whole(size_bytes: int) -> tuple[Span, ...]:
    """All of a file of this size."""
    return ((0, size_bytes),) if size_bytes else ()


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Parts in order, without any twice; those that touch are one."""
    found: list[Span] = []
    for start, length in sorted(spans):
        if found and start <= sum(found[-1]):
            begin, before = found[-1]
            found[-1] = begin, max(before, start + length - begin)
        else:
            found.append((start, length))
    return tuple(found)


def send_files(
    transfers: Sequence[Transfer],
    folder: Path,
    world: World,
    group: dist.ProcessGroup,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Bring files from disk to disk, one after another. All ranks must call this.

    A disk that fails does not break the exchange, or the others would only hear of a lost rank:
    all hear of it a few pieces later.

    Args:
        transfers: the same on every rank.
        folder: where this rank reads what it sends, and writes what it takes.
        world: the ranks.
        group: a CPU group of all of them, over which nothing else is sent meanwhile.
        progress: called on every rank, with the bytes that have been sent and all of them.

    Raises:
        TrainingError: a file could not be read or written, a disk is too small, or what has come
            is not what was sent; the same error on every rank.
    """
    if not transfers:
        return
    ends = _Ends(folder, world, group)
    try:
        ends.check_space(transfers)
        ends.hear_faults()
        at_once = PIECE_BYTES * _PIECES_TOGETHER
        done, heard, total = 0, 0, sum(transfer.size_bytes for transfer in transfers)
        for transfer in transfers:
            ends.begin(transfer)
            for start in range(0, transfer.size_bytes, at_once):
                stop = min(transfer.size_bytes, start + at_once)
                sizes = [min(PIECE_BYTES, stop - at) for at in range(start, stop, PIECE_BYTES)]
                ends.exchange(transfer, sizes)
                done += stop - start
                if done - heard >= at_once:
                    ends.hear_faults()
                    heard = done
                progress(done, total)
            ends.end(transfer)
        ends.compare(transfers)
    finally:
        ends.close()


def _make_folder(folder: Path) -> None:
    """With the one above it and no further: a deleted run directory must not come back."""
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)


class Incoming:
    """A file that is being taken: written as it comes, and hashed.

    Args:
        path: where it goes; its folder is made.
        spans: the parts of it that come.
    """

    def __init__(self, path: Path, spans: Sequence[Span]) -> None:
        _make_folder(path.parent)
        self._stream = io.FileIO(path, "wb")
        self._places = _Places(spans)
        self._hash = hashlib.sha256()

    def write(self, piece: memoryview) -> None:
        """Add what has come."""
        self._hash.update(piece)
        while piece:  # a disk that is nearly full takes a part
            place, length = self._places.next()
            self._stream.seek(place)
            count = self._stream.write(piece[:length])
            self._places.pass_by(count)
            piece = piece[count:]

    def end(self) -> str:
        """SHA-256 of all that has come, which is on the disk now."""
        os.fsync(self._stream.fileno())
        return self._hash.hexdigest()

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            self._stream.close()


class _Outgoing:
    """A file that is being sent: hashed as it is read."""

    def __init__(self, path: Path, spans: Sequence[Span]) -> None:
        self._stream = io.FileIO(path, "rb")
        self._places = _Places(spans)
        self._hash = hashlib.sha256()

    def read(self, piece: memoryview) -> None:
        view = piece
        while view:
            place, length = self._places.next()
            self._stream.seek(place)
            count = self._stream.readinto(view[:length])
            if not count:
                raise OSError(None, "it has become shorter while it was sent")
            self._places.pass_by(count)
            view = view[count:]
        self._hash.update(piece)

    def end(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        with suppress(OSError):
            self._stream.close()


class _Places:
    """Where the next byte of some spans lies."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._left = list(spans)

    def next(self) -> Span:
        """The rest of the span that is under way."""
        return self._left[0]

    def pass_by(self, count: int) -> None:
        """So many bytes of it are done."""
        start, length = self._left[0]
        self._left[:1] = [(start + count, length - count)] if count < length else []


class _Ends:
    """One rank's ends of all transfers: sends, takes, or only hears how it goes."""

    def __init__(self, folder: Path, world: World, group: dist.ProcessGroup) -> None:
        self._folder, self._world, self._group = folder, world, group
        self._file: _Outgoing | Incoming | None = None
        self._fault: UserError | None = None
        self._digests: list[str] = []  # of each transfer; empty where this rank has no part in it
        # Two: one is read or written while the other is on its way.
        self._buffers: list[torch.Tensor] = []

    def check_space(self, transfers: Sequence[Transfer]) -> None:
        wanted = sum(p.size_bytes for p in transfers if self._world.rank in p.takers)
        if wanted:
            self._guard("", lambda: self._check_space(wanted))

    def hear_faults(self) -> None:
        """Raise what has befallen any rank, on all of them."""
        raise_first(self._world.gather(self._fault, group=self._group))

    def begin(self, transfer: Transfer) -> None:
        path = self._folder / _plain(transfer.name)
        if self._world.rank == transfer.sender:
            self._guard(transfer.name, lambda: self._use(_Outgoing(path, transfer.spans)))
        elif self._world.rank in transfer.takers:
            self._guard(transfer.name, lambda: self._use(Incoming(path, transfer.spans)))

    def exchange(self, transfer: Transfer, sizes: Sequence[int]) -> None:
        """Send or take pieces of these sizes."""
        if not self._buffers:
            self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(2)]
        if self._world.rank == transfer.sender:
            self._send(transfer, sizes)
        elif self._world.rank in transfer.takers:
            self._take(transfer, sizes)

    def end(self, transfer: Transfer) -> None:
        self._digests.append("")
        if self._file is not None:
            file, self._file = self._file, None
            self._guard(transfer.name, lambda: self._note(file.end()))
            file.close()

    def compare(self, transfers: Sequence[Transfer]) -> None:
        """Everything has come: compare what was read with what was written."""
        found = self._world.gather((self._fault, self._digests), group=self._group)
        raise_first([fault for fault, _ in found])
        for number, transfer in enumerate(transfers):
            if self._world.rank in transfer.takers:
                sent = found[transfer.sender][1][number]
                wanted = transfer.sha256 or sent
                if self._digests[number] != wanted:
                    self._fault = self._fault or self._changed(transfer, sent == wanted)
        self.hear_faults()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _send(self, transfer: Transfer, sizes: Sequence[int]) -> None:
        file = self._file
        sent: list[list[Any]] = []
        for number, size in enumerate(sizes):
            piece = self._buffers[number % 2][:size]
            while len(sent) > 1:
                self._wait(sent.pop(0))
            if isinstance(file, _Outgoing):
                self._guard(transfer.name, lambda f=file, p=piece: f.read(p.numpy().data))  # type: ignore[misc]
            sent.append([dist.isend(piece, rank, self._group) for rank in transfer.takers])
        for works in sent:
            self._wait(works)

    def _take(self, transfer: Transfer, sizes: Sequence[int]) -> None:
        file = self._file
        coming = [self._receive(transfer, 0, sizes)]
        for number, size in enumerate(sizes):
            if number + 1 < len(sizes):
                coming.append(self._receive(transfer, number + 1, sizes))
            self._wait([coming.pop(0)])
            piece = self._buffers[number % 2][:size]
            if isinstance(file, Incoming):
                self._guard(transfer.name, lambda f=file, p=piece: f.write(p.numpy().data))  # type: ignore[misc]

    def _receive(self, transfer: Transfer, number: int, sizes: Sequence[int]) -> Any:
        piece = self._buffers[number % 2][: sizes[number]]
        return dist.irecv(piece, transfer.sender, self._group)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait(timedelta(seconds=self._world.timeout_s))

    def _use(self, file: _Outgoing | Incoming) -> None:
        self._file = file

    def _note(self, digest: str) -> None:
        self._digests[-1] = digest

    def _check_space(self, wanted: int) -> None:
        _make_folder(self._folder)
        free = shutil.disk_usage(self._folder).free
        if free < wanted + _SPARE_BYTES:
            raise TrainingError(
                f"{format_bytes(wanted)} have to be brought to this disk, {format_bytes(free)} are "
                "free on it",
                where=self._where(),
                fix="free some space there, or set another output_dir",
                id="disk.free",
            )

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        if self._fault is not None:
            return
        try:
            action()
        except UserError as error:
            self._fault = error
        except OSError as error:
            free = ""
            with suppress(OSError):
                free = f"; {format_bytes(shutil.disk_usage(self._folder).free)} are free there"
            self._fault = TrainingError(
                f"{name or 'the disk'}: {error.strerror or error}{free}",
                where=self._where(),
                fix="free some space there, or look after the disk (dmesg)",
                id="checkpoint.unsaved",
            )

    def _changed(self, transfer: Transfer, sent_right: bool) -> TrainingError:
        when = "on its way" if sent_right else "on the disk that it was read from"
        return TrainingError(
            f"{transfer.name} has changed {when}: its SHA-256 is not that of what was to be sent",
            where=f"{self._where()}, sent by rank {transfer.sender}",
            fix="start again; if it comes again, look after the network card, the memory and the "
            "disk of both machines",
            id="checkpoint.broken",
        )

    def _where(self) -> str:
        return f"{self._folder}, rank {self._world.rank} on {self._world.host}"


def _plain(name: str) -> str:
    """A name that leads nowhere else than into a folder."""
    parts = PurePosixPath(name).parts
    assert parts and not name.startswith("/") and ".." not in parts, name
    return name


def raise_first(faults: Sequence[UserError | None]) -> None:
    """Raise the first fault that there is; called with the same faults on every rank."""
    for fault in faults:
        if fault is not None:
            raise fault

"""Bytes between rank 0's files and the ranks' shares of them, in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isles.dist.world import World
from isles.errors import TrainingError, UserError

T = TypeVar("T")

_AT_ONCE = 8 * 2**20


class RankFiles:
    """The ranks of one cluster, and a CPU group of their own for files. All ranks must make one.

    What fails on one rank fails on all of them alike: the exchange itself goes on to its end, so
    that none is left waiting for another.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        timeout = timedelta(seconds=world.timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def agree(self, value: T, failure: UserError | None = None) -> list[T]:
        """Every rank's value, by rank. All ranks must call this.

        Raises:
            UserError: a rank has failed; the first one's, on all ranks.
        """
        outcomes: list[tuple[T, UserError | None]] = self._world.gather(
            (value, failure), group=self._group
        )
        for _, met in outcomes:
            if met is not None:
                raise met
        return [each for each, _ in outcomes]

    def gather(self, head: bytes, parts: Sequence[Tensor], path: Path) -> None:
        """Write the ranks' shares one after the other into a file on rank 0. All must call this.

        Args:
            head: what the file begins with.
            parts: this rank's shares: of all ranks the first, then of all ranks the second, ...
            path: the file; it has its name when it is whole.

        Raises:
            TrainingError: rank 0 could not write it; the same error on every rank.
        """
        sizes = self.agree([_bytes(part).numel() for part in parts])
        file = _File(path, self._world, writes=True)
        file.write(memoryview(head))
        for index, part in enumerate(parts):
            for rank, own in enumerate(sizes):
                for block in self._bring(_bytes(part), own[index], rank):
                    file.write(block.numpy().data)
        file.end_writing()
        self.agree(None, file.failure)

    def scatter(self, path: Path, offset: int, goals: Sequence[Tensor]) -> None:
        """Read a file on rank 0 into the ranks' shares. All ranks must call this.

        Args:
            offset: where the shares begin.
            goals: this rank's shares: of all ranks the first, then of all ranks the second, ...

        Raises:
            TrainingError: it could not be read, or is not what it should be; the same error on
                every rank, which must not use what has come.
        """
        sizes = self.agree([_bytes(goal).numel() for goal in goals])
        file = _File(path, self._world, writes=False)
        file.read(torch.empty(offset, dtype=torch.uint8))
        for index, goal in enumerate(goals):
            for rank, own in enumerate(sizes):
                self._send_out(file, _bytes(goal), own[index], rank)
        file.end_reading()
        self.agree(None, file.failure)

    def _bring(self, mine: Tensor, size: int, rank: int) -> Iterator[Tensor]:
        for start in range(0, size, _AT_ONCE):
            count = min(_AT_ONCE, size - start)
            if rank == self._world.rank == 0:
                yield mine[start : start + count]
            elif self._world.is_main:
                block = torch.empty(count, dtype=torch.uint8)
                dist.recv(block, src=rank, group=self._group)
                yield block
            elif rank == self._world.rank:
                dist.send(mine[start : start + count], dst=0, group=self._group)

    def _send_out(self, file: _File, mine: Tensor, size: int, rank: int) -> None:
        for start in range(0, size, _AT_ONCE):
            count = min(_AT_ONCE, size - start)
            if rank == self._world.rank == 0:
                file.read(mine[start : start + count])
            elif self._world.is_main:
                block = torch.zeros(count, dtype=torch.uint8)
                file.read(block)
                dist.send(block, dst=rank, group=self._group)
            elif rank == self._world.rank:
                dist.recv(mine[start : start + count], src=0, group=self._group)


class _File:
    """Rank 0's file; on other ranks nothing. After its first failure it does nothing any more."""

    def __init__(self, path: Path, world: World, *, writes: bool) -> None:
        self._path, self._host = path, world.host
        self._partial = path.with_name(f".{path.name}.partial")
        self._stream: io.FileIO | None = None
        self.failure: TrainingError | None = None
        if not world.is_main:
            return
        try:
            if writes:
                path.parent.mkdir(exist_ok=True)
            self._stream = io.FileIO(self._partial if writes else path, "wb" if writes else "rb")
        except OSError as error:
            self._fail(error)

    def write(self, view: memoryview) -> None:
        if self._stream is None:
            return
        try:
            while view:  # a disk that is nearly full takes a part
                view = view[self._stream.write(view) :]
        except OSError as error:
            self._fail(error)

    def read(self, block: Tensor) -> None:
        if self._stream is None:
            return
        view = block.numpy().data
        try:
            while view:
                count = self._stream.readinto(view)
                if not count:
                    raise OSError(None, "it is shorter than it must be")
                view = view[count:]
        except OSError as error:
            self._fail(error)

    def end_writing(self) -> None:
        if self._stream is None:
            return
        try:
            self._stream.close()
            self._partial.replace(self._path)
        except OSError as error:
            self._fail(error)

    def end_reading(self) -> None:
        if self._stream is None:
            return
        if self._stream.read(1):
            self._fail(OSError(None, "it is longer than it must be"))
        else:
            self._stream.close()

    def _fail(self, error: OSError) -> None:
        self.failure = TrainingError(
            f"{self._path.name}: {error.strerror or error}",
            where=f"{self._path}, rank 0 on {self._host}",
            fix="is the disk full, or was something in that folder changed by hand? nothing was "
            "taken over from it",
        )
        with suppress(OSError):
            if self._stream is not None:
                self._stream.close()
        self._stream = None
        with suppress(OSError):
            self._partial.unlink()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)

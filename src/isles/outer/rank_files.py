"""Transfer between rank 0's files and the ranks' shares of them, in bounded memory."""

from __future__ import annotations

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
    """The ranks of one cluster, with a separate CPU group for files. All ranks must call every
    method.

    A failure on one rank fails on all ranks: the exchange itself continues to its end, so that no
    rank waits for another forever.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        timeout = timedelta(seconds=world.timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def agree(self, value: T, failure: UserError | None = None) -> list[T]:
        """Every rank's value, by rank; or the first rank's failure, raised on all."""
        outcomes: list[tuple[T, UserError | None]] = self._world.gather(
            (value, failure), group=self._group
        )
        for _, met in outcomes:
            if met is not None:
                raise met
        return [each for each, _ in outcomes]

    def gather(self, head: bytes, parts: Sequence[Tensor], path: Path) -> None:
        """Write a file on rank 0: a header, the first share of all ranks, the second of all, ...

        The file gets its name when it is complete.

        Raises:
            TrainingError: rank 0 could not write it; on every rank.
        """
        failure = None
        partial = path.with_name(f".{path.name}.partial")
        blocks = self._brought(parts)
        if self._world.is_main:
            try:
                path.parent.mkdir(exist_ok=True)
                with partial.open("wb") as file:
                    file.write(head)
                    for block in blocks:
                        file.write(block.numpy().data)
                partial.replace(path)
            except OSError as error:
                failure = self._failure(path, error)
                with suppress(OSError):
                    partial.unlink()
        for _ in blocks:  # on other ranks all of them, on rank 0 those after a failure
            pass
        self.agree(None, failure)

    def scatter(self, path: Path, head: bytes, goals: Sequence[Tensor]) -> None:
        """Read a file written by `gather`, which must begin with a header.

        Raises:
            TrainingError: it could not be read, or has the wrong content; on every rank. The ranks
                must
                not use the received data then.
        """
        failure = file = None
        try:
            if self._world.is_main:
                file = path.open("rb")
                if file.read(len(head)) != head:
                    raise OSError(None, "it belongs to another fragment, layout or outer step")
        except OSError as error:
            failure = self._failure(path, error)
        for block, owner in self._blocks(goals):
            view = block.numpy().data
            if file is not None and failure is None:
                try:
                    if file.readinto(view) != len(view):
                        raise OSError(None, "it is too short")
                except OSError as error:  # the others wait for the data sent below
                    failure = self._failure(path, error)
            if owner and self._world.is_main:
                dist.send(block, dst=owner, group=self._group)
            elif owner:
                dist.recv(block, src=0, group=self._group)
        if file is not None:
            try:
                with file:
                    if failure is None and file.read(1):
                        raise OSError(None, "it is too long")
            except OSError as error:
                failure = self._failure(path, error)
        self.agree(None, failure)

    def _brought(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        # On rank 0 all blocks; the other ranks send theirs.
        for block, owner in self._blocks(parts):
            if owner and self._world.is_main:
                dist.recv(block, src=owner, group=self._group)
            elif owner:
                dist.send(block, dst=0, group=self._group)
            yield block

    def _blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
        # This rank's bytes, and on rank 0 buffers for the bytes of the others, in the order of the
        # file; with the rank that they belong to.
        sizes = self.agree([part.nbytes for part in parts])
        for index, part in enumerate(parts):
            for owner, own in enumerate(sizes):
                for start in range(0, own[index], _AT_ONCE):
                    if owner == self._world.rank:
                        yield part.view(torch.uint8)[start : start + _AT_ONCE], owner
                    elif self._world.is_main:
                        size = min(_AT_ONCE, own[index] - start)
                        yield torch.zeros(size, dtype=torch.uint8), owner

    def _failure(self, path: Path, error: OSError) -> TrainingError:
        return TrainingError(
            f"{path.name}: {error.strerror or error}",
            where=f"{path}, rank 0 on {self._world.host}",
            fix="check whether the disk is full, or whether files in that folder were changed "
            "manually; isles used no data from it",
        )

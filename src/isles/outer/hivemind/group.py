"""An epoch's members over libp2p streams: what `Group` is over gloo, left at any time at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from isles.errors import CommunicationError
from isles.outer.gloo.group import Group
from isles.outer.hivemind.inbox import Stream
from isles.outer.hivemind.node import Node
from isles.outer.hivemind.peers import Writer, hear, say
from isles.outer.messages import EpochAnswer

R = TypeVar("R")

_SLICE_BYTES = 4 * 2**20


class StreamGroup(Group):
    """See `Group`. To be used from another thread than the node's loop.

    Args:
        node: of this cluster.
        loop: the node's event loop.
        epoch: who takes part.
        timeout_s: for connecting, and for each slice of a few MB.
        pace: see `Group`.
    """

    def __init__(
        self,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        epoch: EpochAnswer,
        timeout_s: float,
        pace: Callable[[int], None],
    ) -> None:
        self.rank, self.names = epoch.rank, tuple(epoch.members)
        self.size = len(self.names)
        self.sent_bytes = self.received_bytes = 0
        self._node, self._loop, self._epoch = node, loop, epoch.epoch
        self._term = node.mark()[0]
        self._timeout_s, self._pace = timeout_s, pace
        self._is_left = False
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._out: dict[int, Writer] = {}
        self._into: dict[int, Stream] = {}
        try:
            self._with_all("has not opened a stream to this one", self._connect)
        except BaseException:
            self.leave()
            raise

    async def _connect(self, rank: int) -> None:
        node = self._node
        body = {"term": self._term, "epoch": self._epoch, "rank": self.rank}
        opening = node.peers.open(node.peer_of(self.names[rank]), "pieces", body)
        incoming = node.inbox.get((self._term, self._epoch, rank))
        (_, _, self._out[rank]), self._into[rank] = await asyncio.gather(opening, incoming)

    def compare(self, header: dict[str, int | str]) -> None:
        """See `Group`."""

        async def one(rank: int) -> None:
            _, found = await asyncio.gather(
                say(self._out[rank], dict(header)), hear(self._into[rank].reader)
            )
            differing = [
                f"{key} is {header[key]} here" for key in header if header[key] != found.get(key)
            ]
            if differing:
                raise CommunicationError(
                    f"cluster {self.names[rank]} is about to average something else: "
                    f"{', '.join(differing)}",
                    where=f"cluster {self.names[self.rank]}",
                    fix="install the same version of isles on all clusters",
                )

        self._with_all("has not said what it is about to average", one)

    def exchange(self, rows: Sequence[Tensor], sizes: Sequence[int], longest: int) -> list[Tensor]:
        """See `Group`."""
        found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        found[self.rank] = rows[self.rank]
        for start in range(0, longest if self._others else 0, _SLICE_BYTES):
            part = slice(start, start + _SLICE_BYTES)
            sent = sum(len(rows[rank][part]) for rank in self._others)
            self._pace(sent)

            async def one(rank: int, part: slice = part) -> None:
                writer, goal = self._out[rank], found[rank][part]
                writer.write(rows[rank][part].numpy().tobytes())
                _, data = await asyncio.gather(
                    writer.drain(), self._into[rank].reader.readexactly(len(goal))
                )
                goal.numpy().data[:] = data

            self._with_all("has not sent its part", one)
            self.sent_bytes += sent
            self.received_bytes += sum(len(found[rank][part]) for rank in self._others)
        return found

    def _with_all(self, fault: str, one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Do something with each of the others at the same time.

        Raises:
            CommunicationError: one has not done its part within the time, or is gone; says who.
        """
        self._check()
        asyncio.run_coroutine_threadsafe(self._gather(fault, one), self._loop).result()

    async def _gather(self, fault: str, one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        tasks = {asyncio.create_task(one(rank)): self.names[rank] for rank in self._others}
        if not tasks:
            return
        done, late = await asyncio.wait(
            tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in late:
            task.cancel()
        for task in done:
            error = task.exception()
            if isinstance(error, OSError | asyncio.IncompleteReadError | ValueError):
                self._fail(f"cluster {tasks[task]} is cut off: {error}")
            if error is not None:
                raise error
        if late:
            names = ", ".join(sorted(tasks[task] for task in late))
            self._fail(f"cluster {names} {fault} within {self._timeout_s:g} s")

    def _fail(self, what: str) -> None:
        raise CommunicationError(
            what,
            where=f"cluster {self.names[self.rank]}",
            fix="nothing, if it happens once: the turn is repeated with those who live",
        )

    def leave(self) -> None:
        """Begin nothing more, and wait for nobody; from any thread."""
        self._is_left = True
        self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        for writer in self._out.values():
            writer.close()
        self._node.inbox.forget(self._term, self._epoch)

"""Streams that other clusters open to this one for an epoch, perhaps before it knows of that."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from isles.outer.hivemind.peers import Reader, Writer

Key = tuple[int, int, int]
"""Term, epoch, and the rank that opens the stream."""


@dataclass(slots=True)
class Stream:
    """What has come."""

    reader: Reader
    writer: Writer
    done: asyncio.Event


class Inbox:
    """Keeps streams until they are asked for."""

    def __init__(self) -> None:
        self._slots: dict[Key, asyncio.Future[Stream]] = {}
        self._over = (-1, -1)

    def put(self, key: Key, reader: Reader, writer: Writer) -> Stream | None:
        """A stream has come; None: too late, or for the second time."""
        slot = None if key[:2] <= self._over else self._slot(key)
        if slot is None or slot.done():
            return None
        stream = Stream(reader, writer, asyncio.Event())
        slot.set_result(stream)
        return stream

    def _slot(self, key: Key) -> asyncio.Future[Stream]:
        if key not in self._slots:
            self._slots[key] = asyncio.get_running_loop().create_future()
        return self._slots[key]

    async def get(self, key: Key) -> Stream:
        """Wait for a stream."""
        return await asyncio.shield(self._slot(key))

    def forget(self, term: int, epoch: int) -> None:
        """An epoch is over for this cluster: end what came for it, and for any before."""
        self._over = max(self._over, (term, epoch))
        for key in [key for key in self._slots if key[:2] <= self._over]:
            slot = self._slots.pop(key)
            if slot.done():
                slot.result().done.set()

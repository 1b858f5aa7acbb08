"""Ways through this process: from a port on this machine to the hub, wherever it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from isles.outer.hivemind.peers import Reader, Writer

log = logging.getLogger(__name__)

Streams = tuple[Reader, Writer]

_SLICE = 1 << 16


class Tunnel:
    """Listens on the loopback only, and passes on what comes.

    Args:
        lead: a way to the rendezvous, or None where nobody hosts it.
    """

    def __init__(self, lead: Callable[[], Awaitable[Streams | None]]) -> None:
        self._lead = lead
        self._ways: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Begin to listen; the port."""
        self._server = await asyncio.start_server(self._come_in, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _come_in(self, reader: Reader, writer: Writer) -> None:
        try:
            far = await self._lead()
            if far is not None:
                await self.join(reader, writer, *far)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            log.debug("no way to the rendezvous: %s", error)
        finally:
            writer.close()

    async def join(
        self, reader: Reader, writer: Writer, far_reader: Reader, far_writer: Writer
    ) -> None:
        """Pass on what comes at either end, until one ends."""
        ways = {
            asyncio.create_task(_pump(reader, far_writer)),
            asyncio.create_task(_pump(far_reader, writer)),
        }
        self._ways |= ways
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self._ways -= ways
            far_writer.close()

    def cut(self) -> None:
        """End all ways: they lead where the rendezvous was."""
        for way in self._ways:
            way.cancel()


async def _pump(reader: Reader, writer: Writer) -> None:
    with suppress(OSError):
        while data := await reader.read(_SLICE):
            writer.write(data)
            await writer.drain()

"""Bodies of requests and answers that come over a slow link."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from aiohttp import StreamReader

_WAKE_BYTES, _TLS_BYTES, _PATIENCE_S = 1 << 16, 1 << 15, 1.0


async def read_body(
    content: StreamReader, transport: asyncio.BaseTransport | None, size: int
) -> bytes:
    """Exactly `size` bytes of a body that comes over a slow link.

    A packet at a time would wake this process a thousand times a second, which costs more than all
    else that is done with the bytes: the socket tells only of 64 KiB and more, or after a second.

    Args:
        transport: over which they come; None: they are all here.

    Raises:
        asyncio.IncompleteReadError: it ends before.
    """
    found = bytearray()

    loop = asyncio.get_running_loop()

    def wake_at(num_bytes: int) -> None:
        if transport is None or transport.is_closing():
            return
        sock = transport.get_extra_info("socket")
        with suppress(OSError):  # not every kernel knows it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    try:
        while (left := size - len(found)) > 0:
            # Some of what is left may be here already, as the beginning of a record of TLS.
            wake_at(max(1, min(_WAKE_BYTES, left - _TLS_BYTES)))
            impatient = loop.call_later(_PATIENCE_S, wake_at, 1)
            try:
                part = await content.readany()
            finally:
                impatient.cancel()
            if not part:
                raise asyncio.IncompleteReadError(bytes(found), size)
            found += part
    finally:
        wake_at(1)
    return bytes(found[:size])

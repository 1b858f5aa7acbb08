"""Bodies of requests and answers over a slow link."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from aiohttp import StreamReader

_WAKE_BYTES, _TLS_BYTES, _PATIENCE_S = 1 << 16, 1 << 15, 1.0


async def read_body(
    content: StreamReader, transport: asyncio.BaseTransport | None, size: int
) -> bytes:
    """Read exactly `size` bytes of a body that arrives over a slow link.

    Waking this process for every packet would happen a thousand times per second, and would cost
    more than all other work on the bytes. So the socket reports only 64 KiB and more, or after a
    second.

    Args:
        transport: transport of the body; None: all bytes have arrived.

    Raises:
        asyncio.IncompleteReadError: the body ends early.
    """
    found = bytearray()

    loop = asyncio.get_running_loop()

    def wake_at(num_bytes: int) -> None:
        if transport is None or transport.is_closing():
            return
        sock = transport.get_extra_info("socket")
        with suppress(OSError):  # not every kernel supports it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    try:
        while (left := size - len(found)) > 0:
            # Some of the rest may have arrived already, as the beginning of a TLS record.
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

"""The hub's connections: accepted here, with strict limits for connections without the token."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from isles.run.unauthenticated import WITHIN_S, Unauthenticated, network

_MOST, _EACH, _OWN = 1024, 16, 12
"""Limits of connections with the token: the smallest limit, the limit for each cluster that may
take part, and the connections that no other member can close. A member needs about ten."""
_WRITE_BYTES = 2**16
"""Send buffer of each connection, for an answer that the client does not read."""
_LOOK_S, _PAUSE_S, _HEARD_S = 1.0, 0.2, 20.0


class Acceptor:
    """Accepts connections for an event loop, and closes them unless they show the token in time.

    The time counts from the first packet. It also covers silent connections, connections that stop
    during the TLS handshake or the request header, and connections with a wrong token.

    Args:
        listening: a socket that listens.
        context: TLS context.
        protocol: makes the protocol that serves a connection.
        clusters: the number of clusters that may take part.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        clusters: int,
    ) -> None:
        self._listening, self._context, self._protocol = listening, context, protocol
        self._most = max(_MOST, _EACH * clusters)
        self._sockets: dict[int, socket.socket] = {}
        self._networks: dict[socket.socket, str] = {}
        self._ids: dict[socket.socket, str] = {}
        self._heard: dict[str, float] = {}
        self._unauthenticated = Unauthenticated[socket.socket](_hang_up)
        self._members: dict[socket.socket, None] = {}  # the oldest first
        self._greeting: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._look())]

    def knows(self, transport: asyncio.BaseTransport | None, member_id: str) -> None:
        """Note that a request with the token has come over a connection.

        Args:
            member_id: id of the requesting member; empty: unknown (yet).
        """
        known = None if transport is None else transport.get_extra_info("socket")
        found = None if known is None else self._sockets.get(known.fileno())
        if transport is None or found is None:
            return
        if member_id:
            self._ids[found] = member_id
            self._heard[member_id] = asyncio.get_running_loop().time()
        if self._unauthenticated.forget(found):
            assert isinstance(transport, asyncio.WriteTransport)
            transport.set_write_buffer_limits(high=_WRITE_BYTES)
            self._members[found] = None
            if len(self._members) > self._most:
                self._make_room()

    def _make_room(self) -> None:
        # The client with the most connections cannot keep others out; nor can many addresses with
        # one each.
        owners = {each: self._owner(each) for each in self._members}
        counts = Counter(owners.values())
        for member_id in self._heard:
            counts[member_id] -= _OWN
        most = counts.most_common(1)[0][0]
        oldest = next(each for each, owner in owners.items() if owner == most)
        del self._members[oldest]
        _hang_up(oldest)

    def _owner(self, connection: socket.socket) -> str:
        return self._ids.get(connection) or self._networks.get(connection, "")

    async def close(self) -> None:
        """Accept no more. The server closes connections that were served."""
        tasks = [*self._tasks, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError:  # for a moment this process has too many open files
                await asyncio.sleep(_PAUSE_S)
                continue
            connection.setblocking(False)
            self._forget(
                self._sockets.get(connection.fileno())
            )  # an old connection with the same number
            self._sockets[connection.fileno()] = connection
            self._networks[connection] = network(address[0])
            self._unauthenticated.add(connection, address[0])
            task = asyncio.create_task(self._greet(connection))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=WITHIN_S,
            )
        except OSError:  # it is closed, or does not use TLS
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for number, connection in list(self._sockets.items()):
                if connection.fileno() == -1:  # closed
                    del self._sockets[number]
                    self._forget(connection)
            self._unauthenticated.look()
            now = asyncio.get_running_loop().time()
            self._heard = {each: at for each, at in self._heard.items() if now - at < _HEARD_S}

    def _forget(self, connection: socket.socket | None) -> None:
        if connection is not None:
            self._unauthenticated.forget(connection)
            self._members.pop(connection, None)
            self._networks.pop(connection, None)
            self._ids.pop(connection, None)


def _hang_up(connection: socket.socket) -> None:
    # Its reader notices the end, and closes it.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

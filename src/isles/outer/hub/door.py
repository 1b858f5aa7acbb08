"""Who may come in: TLS, the token before anything else, and little patience before it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import sqlite3
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from isles.errors import CommunicationError, UserError
from isles.outer.hub.refusal import Refusal
from isles.outer.messages import ErrorBody

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HANDSHAKE_S = 10.0
_FIRST_REQUEST_S = 15.0
_MOST_UNKNOWN = 256
_TELL_EVERY_S = 10.0
_FULL_S = 0.2
_BACKLOG = 128
_DISK_FULL = 507


@dataclass(slots=True, eq=False)
class UnknownConnection:
    """A connection that has not shown the token."""

    address: str
    connection: socket.socket
    protocol: asyncio.Protocol | None = None
    transport: asyncio.BaseTransport | None = None
    task: asyncio.Task[None] | None = None

    def end(self, _: object) -> None:
        """Nobody attends to it any more: a connection without a transport is nobody's."""
        if self.transport is None:
            self.connection.close()


class Door:
    """Takes connections, and closes those that show no token in time."""

    def __init__(self, token: str) -> None:
        self._token = hashlib.sha256(token.encode()).digest()
        self._refused = 0
        self._tell_at = 0.0
        # In the order in which they came.
        self._unknown: dict[UnknownConnection, None] = {}
        self._by_protocol: dict[object, UnknownConnection] = {}
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    @web.middleware
    async def check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """401, whatever was asked for, unless the request carries the token."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
        if not hmac.compare_digest(digest, self._token) or scheme != "Bearer":
            self._refused += 1
            self._tell(
                "refused: a request from %s without the right token (%d so far)",
                request.remote,
                self._refused,
            )
            body = ErrorBody(
                kind="token",
                what="the token is not this rendezvous's",
                fix="use the join line that this rendezvous has written",
            )
            return _answer(401, body)
        self._welcome(request.protocol)
        return await handler(request)

    def _tell(self, text: str, *values: object) -> None:
        """Log what unknown connections do, but not so often that they could fill the disk."""
        now = asyncio.get_running_loop().time()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY_S
            log.warning(text, *values)

    async def listen(self, runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext) -> int:
        """Listen at one address, and nowhere else.

        Returns:
            The port.

        Raises:
            CommunicationError: the address is not this machine's, or the port is taken.
        """
        make = runner.server
        assert make is not None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            raise CommunicationError(
                f"the rendezvous cannot listen at {host}:{port}: {error}",
                where="--listen",
                fix="give an address of this machine and a free port",
                id="rendezvous.address",
            ) from error
        listening.setblocking(False)
        self._listening = listening
        self._accepting = asyncio.create_task(self._accept(listening, make, tls))
        return int(listening.getsockname()[1])

    async def _accept(
        self, listening: socket.socket, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext
    ) -> None:
        """Take connections; a flood from one address pushes out its own, and nobody else's."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:  # no file handles left, say
                self._tell("cannot take a connection: %s", error)
                await asyncio.sleep(_FULL_S)
                continue
            unknown = UnknownConnection(str(address[0]), connection)
            if len(self._unknown) >= _MOST_UNKNOWN:
                self._push_out()
            self._unknown[unknown] = None
            unknown.task = loop.create_task(self._greet(unknown, make, tls))
            unknown.task.add_done_callback(unknown.end)

    def _push_out(self) -> None:
        """Close the oldest unknown connection of the address that has most."""
        crowd, _ = Counter(other.address for other in self._unknown).most_common(1)[0]
        self._close(next(other for other in self._unknown if other.address == crowd))

    async def _greet(
        self, unknown: UnknownConnection, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext
    ) -> None:
        """Shake hands, and close the connection unless it shows the token in time."""
        loop = asyncio.get_running_loop()
        unknown.protocol = protocol = make()
        self._by_protocol[protocol] = unknown
        try:
            unknown.transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                unknown.connection,
                ssl=tls,
                ssl_handshake_timeout=_HANDSHAKE_S,
                ssl_shutdown_timeout=_HANDSHAKE_S,
            )
            loop.call_later(_FIRST_REQUEST_S, self._close, unknown)
        except (OSError, ssl.SSLError):  # who speaks no TLS, or has gone
            self._close(unknown)

    def _welcome(self, protocol: asyncio.BaseProtocol | None) -> None:
        """A connection has shown the token: it may stay."""
        unknown = self._by_protocol.pop(protocol, None)
        if unknown is not None:
            self._unknown.pop(unknown, None)

    def _close(self, unknown: UnknownConnection) -> None:
        if unknown not in self._unknown:
            return
        del self._unknown[unknown]
        self._by_protocol.pop(unknown.protocol, None)
        if isinstance(unknown.transport, asyncio.WriteTransport):
            unknown.transport.abort()
        if unknown.task is not None:
            unknown.task.cancel()

    async def close(self) -> None:
        """Take no more connections."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        for unknown in list(self._unknown):
            self._close(unknown)


@web.middleware
async def explain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong becomes an answer in words; only our own faults get a traceback."""
    try:
        return await handler(request)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        status, body = _explain(error)
        if status == 500:
            log.exception("a fault of the rendezvous at %s %s", request.method, request.path)
        elif status == _DISK_FULL:
            log.error("disk: %s", error)
        return _answer(status, body)


def _explain(error: Exception) -> tuple[int, ErrorBody]:
    match error:
        case Refusal():
            return error.status, ErrorBody(kind=error.kind, what=error.what, fix=error.fix)
        case web.HTTPException():
            return error.status, ErrorBody(kind="http", what=f"{error.status} {error.reason}")
        case UserError():
            return 422, ErrorBody(kind="malformed", what=error.what, fix=error.fix)
        case ConnectionError() | TimeoutError():
            return 408, ErrorBody(kind="slow", what="the request's body did not come in time")
        case OSError() | sqlite3.OperationalError():
            what = f"the rendezvous's disk: {getattr(error, 'strerror', None) or error}"
            fix = "free some space in its state directory; clusters try again by themselves"
            return _DISK_FULL, ErrorBody(kind="disk", what=what, fix=fix)
        case _:
            fix = "its log has the traceback"
            return 500, ErrorBody(kind="bug", what="the rendezvous has failed", fix=fix)


def _answer(status: int, body: ErrorBody) -> web.Response:
    return web.Response(
        status=status, body=body.model_dump_json().encode(), content_type="application/json"
    )

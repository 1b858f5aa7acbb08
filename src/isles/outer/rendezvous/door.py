"""Who may come in: TLS, the token before anything else, and little patience with strangers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from isles.errors import CommunicationError, UserError
from isles.outer.messages import ErrorBody
from isles.outer.rendezvous.refusal import Refusal

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HANDSHAKE_S = 10.0
_FIRST_REQUEST_S = 15.0
_MOST_STRANGERS = 256
_TELL_EVERY_S = 10.0
_DISK_FULL = 507


class Door:
    """Takes connections, and closes those that show no token in time."""

    def __init__(self, token: str) -> None:
        self._token = hashlib.sha256(token.encode()).digest()
        self._refused = 0
        self._tell_at = 0.0
        self._strangers: set[asyncio.BaseProtocol] = set()
        self._server: asyncio.Server | None = None

    @web.middleware
    async def check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """401, whatever was asked for, unless the request carries the token."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
        if not hmac.compare_digest(digest, self._token) or scheme != "Bearer":
            self._tell(request)
            body = ErrorBody(
                kind="token",
                what="the token is not this rendezvous's",
                fix="use the join line that this rendezvous has written",
            )
            return _answer(401, body)
        self._strangers.discard(request.protocol)
        return await handler(request)

    def _tell(self, request: web.Request) -> None:
        """Log strangers, but not so often that they could fill the disk."""
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY_S
            log.warning(
                "refused: a request from %s without the right token (%d so far)",
                request.remote,
                self._refused,
            )

    async def listen(self, runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext) -> int:
        """Listen at one address, and nowhere else.

        Returns:
            The port.

        Raises:
            CommunicationError: the address is not this machine's, or the port is taken.
        """
        make = runner.server
        assert make is not None
        loop = asyncio.get_running_loop()

        def connect() -> asyncio.BaseProtocol:
            protocol: asyncio.Protocol = make()
            if len(self._strangers) >= _MOST_STRANGERS:
                self._close(next(iter(self._strangers)))
            self._strangers.add(protocol)
            loop.call_later(_FIRST_REQUEST_S, self._close_stranger, protocol)
            return protocol

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = await loop.create_server(
                connect,
                host,
                port,
                family=family,
                ssl=tls,
                ssl_handshake_timeout=_HANDSHAKE_S,
                ssl_shutdown_timeout=_HANDSHAKE_S,
                backlog=128,
            )
        except (OSError, UnicodeError) as error:
            raise CommunicationError(
                f"the rendezvous cannot listen at {host}:{port}: {error}",
                where="--listen",
                fix="give an address of this machine and a free port",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    def _close_stranger(self, protocol: asyncio.BaseProtocol) -> None:
        if protocol in self._strangers:
            self._close(protocol)

    def _close(self, protocol: asyncio.BaseProtocol) -> None:
        self._strangers.discard(protocol)
        transport = getattr(protocol, "transport", None)
        if transport is not None:
            transport.abort()

    async def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()


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
        case OSError():
            what = f"the rendezvous's disk: {error.strerror or error}"
            fix = "free some space in its state directory; clusters try again by themselves"
            return _DISK_FULL, ErrorBody(kind="disk", what=what, fix=fix)
        case _:
            fix = "its log has the traceback"
            return 500, ErrorBody(kind="bug", what="the rendezvous has failed", fix=fix)


def _answer(status: int, body: ErrorBody) -> web.Response:
    return web.Response(
        status=status, body=body.model_dump_json().encode(), content_type="application/json"
    )

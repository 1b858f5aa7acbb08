"""Requests to the hub: tried again until a deadline."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from isles.errors import CommunicationError
from isles.outer.messages import ErrorBody, Message
from isles.run.join_line import JoinLine

A = TypeVar("A", bound=BaseModel)
R = TypeVar("R")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_ATTEMPT_S = 20.0
_STALL_S = 20.0
_CONNECT_S = 10.0
_BURST_S = 0.05
_SLICE = 1 << 16
_SECRET = re.compile(r"[0-9a-f]{32}")
"""A member's id, in an address: who knows it can speak in its name."""
_BIG_SLICE = 1 << 18
WHO_IS_THERE = frozenset({"token", "certificate", "http", "protocol"})
"""Refusals by somebody who may only for a while stand where the hub was."""
_TRY_AGAIN = frozenset({408, 429, 500, 502, 503, 504, 507})


class HubRefusal(CommunicationError):
    """The hub has understood, and says no.

    Args:
        kind: one word for programs: late, behind, refused, other_run, name_taken …
        what: what is wrong.
        where: the hub.
        fix: what to do.
    """

    id = "hub.refused"

    def __init__(self, kind: str, what: str, *, where: str, fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.kind = kind


class _TryAgain(Exception):
    pass


class RateLimit:
    """Limit on bytes per second, shared by all connections that ask it; first come, first served.

    Args:
        bytes_per_s: the rate; 0: no limit. It may be changed at any time.
        clock: seconds that only grow; left out, the event loop's.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    def delay(self, num_bytes: int) -> float:
        """Count bytes in; seconds until they may pass."""
        if self.bytes_per_s <= 0:
            return 0.0
        now = self._clock() if self._clock else asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - _BURST_S) + num_bytes / self.bytes_per_s
        return max(0.0, self._free_at - now)


class Channel:
    """All connections of one cluster to its hub.

    A request is tried until it works or its deadline is over. Then, or where the hub is another, it
    raises `CommunicationError`; where the hub says no, `HubRefusal`.

    Args:
        line: where it is, and how to know it.
        connections: at most so many at a time.
        up: limits what is sent.
        down: limits what is fetched.
    """

    def __init__(self, line: JoinLine, connections: int, up: RateLimit, down: RateLimit) -> None:
        self.line = line
        self.connections = connections
        self.up = up
        self.down = down
        self.sent_bytes = 0
        self.received_bytes = 0
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(
            # One more, so that heartbeats pass while files travel on all others.
            limit=self.connections + 2,
            ssl=aiohttp.Fingerprint(self.line.fingerprint),
            keepalive_timeout=30.0,
            socket_factory=_make_socket,
        )
        self._session = aiohttp.ClientSession(
            self.line.url,
            connector=connector,
            headers={"Authorization": f"Bearer {self.line.token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, kind: type[A], deadline_s: float, wait_s: float = 0.0) -> A:

        async def attempt() -> A:
            query = {"wait": f"{wait_s:g}"} if wait_s else {}
            async with asyncio.timeout(_ATTEMPT_S + wait_s):
                return self._parse(await self._request("GET", path, params=query), kind)

        return await self._until(attempt, deadline_s, f"GET {path}")

    async def post(
        self, path: str, body: Message, kind: type[A], deadline_s: float, attempt_s: float = 0.0
    ) -> A:

        async def attempt() -> A:
            async with asyncio.timeout(attempt_s or _ATTEMPT_S):
                data = body.model_dump_json().encode()
                headers = {"Content-Type": "application/json"}
                answer = await self._request("POST", path, data=data, headers=headers)
                return self._parse(answer, kind)

        return await self._until(attempt, deadline_s, f"POST {path}")

    async def put(self, path: str, data: bytes, sha256: str, deadline_s: float) -> None:

        async def attempt() -> None:
            async with asyncio.timeout(_STALL_S) as timer:
                headers = {"X-Sha256": sha256, "Content-Length": str(len(data))}
                body = self._slices(data, timer)
                await self._request("PUT", path, data=body, headers=headers)
            self.sent_bytes += len(data)

        await self._until(attempt, deadline_s, f"PUT {path}")

    async def _slices(self, data: bytes, timer: asyncio.Timeout) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        size = _SLICE if self.up.bytes_per_s else _BIG_SLICE
        for start in range(0, len(data), size):
            part = data[start : start + size]
            delay_s = self.up.delay(len(part))
            _put_off(timer, loop.time() + delay_s + _STALL_S)
            if delay_s:
                await asyncio.sleep(delay_s)
            yield part

    async def fetch(self, path: str, start: int, size: int, deadline_s: float) -> bytes:
        session = self._session
        assert session is not None
        loop = asyncio.get_running_loop()

        async def attempt() -> bytes:
            data = bytearray()
            # Whatever is asked for comes as fast as the link can: so ask only when it may come.
            await asyncio.sleep(self.down.delay(size))
            headers = {"Range": f"bytes={start}-{start + size - 1}"}
            async with asyncio.timeout(_STALL_S) as timer:
                async with session.get(path, headers=headers) as response:
                    if response.status not in (200, 206):
                        self._raise(response.status, await response.read())
                    if response.status != 206 and start:
                        raise _TryAgain("the hub sends a file from its beginning")
                    while len(data) < size:
                        part = await response.content.read(min(_BIG_SLICE, size - len(data)))
                        if not part:
                            raise _TryAgain("the connection was cut")
                        data += part
                        _put_off(timer, loop.time() + _STALL_S)
            self.received_bytes += len(data)
            return bytes(data)

        return await self._until(attempt, deadline_s, f"GET {path}")

    async def _request(self, method: str, path: str, **options: object) -> bytes:
        assert self._session is not None
        async with self._session.request(method, path, **options) as response:  # type: ignore[arg-type]
            body = await response.read()
            if response.status not in (200, 204):
                self._raise(response.status, body)
            return body

    def _raise(self, status: int, body: bytes) -> None:
        try:
            error = ErrorBody.model_validate_json(body)
        except ValidationError:
            error = ErrorBody(kind="http", what=f"HTTP status {status}: {body[:200]!r}")
        if status in _TRY_AGAIN:
            raise _TryAgain(error.what)
        raise HubRefusal(error.kind, error.what, where=str(self.line), fix=error.fix)

    def _parse(self, body: bytes, kind: type[A]) -> A:
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise HubRefusal(
                "protocol",
                f"the hub gives an answer that is no {kind.__name__}: {body[:200]!r}",
                where=str(self.line),
                fix="install the same version of isles there and here",
            ) from error

    async def _until(self, attempt: Callable[[], Awaitable[R]], deadline_s: float, what: str) -> R:
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout_at(end):
                    return await attempt()
            except aiohttp.ServerFingerprintMismatch as error:
                raise HubRefusal(
                    "certificate",
                    f"the server there shows a certificate with sha256 {error.got.hex()[:16]}…, "
                    f"the join line names {error.expected.hex()[:16]}…",
                    where=str(self.line),
                    fix="use the present join line of the hub; if it is, somebody stands "
                    "between it and this machine",
                ) from None
            except (aiohttp.ClientError, OSError, TimeoutError, _TryAgain) as error:
                last = str(error) or type(error).__name__
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            delay_s = pause_s * random.uniform(0.5, 1.0)
            if loop.time() + delay_s >= end:
                asked = _SECRET.sub("…", what)
                raise CommunicationError(
                    f"{asked} has not worked for {deadline_s:.0f} s; at last: {last}",
                    where=str(self.line),
                    fix="look whether the hub runs and can be reached from here "
                    f"(curl -k {self.line.url}/v1/status answers 401)",
                    id="hub.silent",
                )
            await asyncio.sleep(delay_s)


def _put_off(timer: asyncio.Timeout, when: float) -> None:
    # There is progress: the attempt has more time, unless it is over already.
    if not timer.expired() and timer.when() is not None:
        timer.reschedule(when)


def _make_socket(info: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    # Notices within half a minute when the other end is gone without a word.
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made

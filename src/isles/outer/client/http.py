"""Requests to the hub, and chunked files in both directions; each is retried until a deadline."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, RootModel, ValidationError

from isles.errors import CommunicationError
from isles.outer.body import read_body
from isles.outer.hub.rules import FINISHED
from isles.outer.messages import (
    CHUNK_BYTES,
    ErrorBody,
    Message,
    Received,
    Sha256,
    chunk_size,
    digest_of,
    hash_chunks,
    num_chunks,
)
from isles.run.join_line import NOTHING_LEFT, JoinLine, apart
from isles.run.web import MOST_BYTES

A = TypeVar("A", bound=BaseModel)
R = TypeVar("R")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CONNECT_S, _SILENT_S = 10.0, 20.0
_BURST_S = 0.05
_SLICE, _BIG_SLICE = 1 << 16, 1 << 18
_AT_ONCE = 4
"""Number of chunks of a file in transfer at a time."""
_CHUNK_TEXT = 100
"""Limit of an answer about one chunk of a file, in characters."""
_ERROR_BYTES, _MOST_LETTERS = 2**16, 500
_WRONG_HASHES = 3
_SECRET = re.compile(r"[0-9a-f]{32}")
"""Pattern of a member's id in an address; it is secret, because it authorizes requests."""
WHO_IS_THERE = frozenset({"token", "certificate", "http", "protocol", "forbidden", "missing"})
"""Refusals of a server that may only temporarily answer in place of the hub; or of a bucket, whose
credentials may be renewed."""
_TRY_AGAIN = frozenset({408, 429, 500, 502, 503, 504, 507})


class HubRefusal(CommunicationError):
    """The hub has understood the request and refuses it; `kind` is one word for programs."""

    id = "hub.refused"

    def __init__(self, kind: str, what: str, *, where: str, fix: str = "") -> None:
        id = NOTHING_LEFT if kind == FINISHED else None
        super().__init__(what, where=where, fix=fix, id=id)
        self.kind = kind


class DeadlineError(CommunicationError):
    """A request has not succeeded by its deadline."""


class _TryAgain(Exception):
    pass


class _Hashes(RootModel[list[Sha256]]):
    pass


class RateLimit:
    """Limit on bytes per second, shared by all connections that use it, in order of arrival.

    Args:
        bytes_per_s: 0: no limit. It may be changed at any time.
        clock: monotonic seconds; default: the event loop's.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self.total = 0
        """Bytes that have passed, in whole chunks."""
        self._clock = clock
        self._free_at = 0.0

    def delay(self, num_bytes: int) -> float:
        """Count bytes; returns the seconds until they may pass."""
        if self.bytes_per_s <= 0:
            return 0.0
        now = self._clock() if self._clock else asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - _BURST_S) + num_bytes / self.bytes_per_s
        return max(0.0, self._free_at - now)


class HubConnection:
    """All connections of one cluster to its hub.

    A request is retried until it works or its deadline is over, with `DeadlineError`. If the hub
    refuses, or is a different hub, it raises `HubRefusal`.
    """

    def __init__(self, line: JoinLine, member_id: str, up: RateLimit, down: RateLimit) -> None:
        self.line, self.up, self.down = line, up, down
        self._member_id = member_id

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(
            limit=0,  # heartbeats pass while files travel
            ssl=aiohttp.Fingerprint(self.line.fingerprint),
            keepalive_timeout=30.0,
            socket_factory=_make_socket,
        )
        # The id tells the hub which member's limits apply.
        headers = {"Authorization": f"Bearer {self.line.token}", "X-Member": self._member_id}
        self._session = aiohttp.ClientSession(
            self.line.url,
            connector=connector,
            headers=headers,
            auto_decompress=False,  # a compressed answer could be unlimited
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(
        self,
        path: str,
        kind: type[A],
        deadline_s: float,
        body: Message | None = None,
        *,
        patience_s: float = 0.0,
        most_bytes: int = MOST_BYTES,
    ) -> A:
        """GET, or POST a body; the hub may take `patience_s` longer than usual to answer."""
        method, options = "GET", dict[str, Any]()
        if body is not None:
            method, options["data"] = "POST", body.model_dump_json().encode()
            options["headers"] = {"Content-Type": "application/json"}

        async def attempt() -> A:
            async with self._request(method, path, patience_s, **options) as response:
                answer = await _read(response, most_bytes)
            try:
                return kind.model_validate_json(answer)
            except ValidationError as error:
                raise HubRefusal(
                    "protocol",
                    f"the answer of the hub is not a valid {kind.__name__}",
                    where=str(self.line),
                    fix="install the same version of isles on both machines",
                ) from error

        return await self._until(attempt, deadline_s, f"{method} {path}")

    async def upload(
        self, place: str, path: Path, hashes: Sequence[str], deadline_s: float
    ) -> None:
        """Upload the chunks of a file, with these hashes, that the hub does not have.

        Args:
            place: address of the file on the hub: GET lists its chunks, PUT …/CHUNK adds one.
        """
        end = _now() + deadline_s
        size_bytes = path.stat().st_size
        most = MOST_BYTES + _CHUNK_TEXT * num_chunks(size_bytes)
        there = await self.ask(place, Received, deadline_s, most_bytes=most)
        if there.size_bytes != size_bytes:
            raise HubRefusal(
                "malformed",
                f"{path.name} has {size_bytes} bytes, but the hub expects {there.size_bytes}",
                where=str(self.line),
                fix="use the same model and fragments on all clusters",
            )
        missing = [i for i, sha256 in enumerate(hashes) if there.chunks.get(str(i)) != sha256]
        handle = os.open(path, os.O_RDONLY)

        async def send(index: int) -> None:
            size, start = chunk_size(size_bytes, index), index * CHUNK_BYTES
            data = await asyncio.to_thread(os.pread, handle, size, start)
            address = f"{place}/{index}"

            async def attempt() -> None:
                headers = {"X-Sha256": hashes[index], "Content-Length": str(size)}
                async with self._request("PUT", address, data=self._slices(data), headers=headers):
                    self.up.total += size

            await self._until(attempt, end - _now(), f"PUT {address}")

        try:
            await in_parallel(send, missing)
        finally:
            os.close(handle)

    async def _slices(self, data: bytes) -> AsyncIterator[bytes]:
        size = _SLICE if self.up.bytes_per_s else _BIG_SLICE
        for start in range(0, len(data), size):
            part = data[start : start + size]
            await asyncio.sleep(self.up.delay(len(part)))
            yield part

    async def download(
        self, place: str, size_bytes: int, digest: str, target: Path, deadline_s: float
    ) -> None:
        """Fetch a file; resumes an interrupted transfer.

        Args:
            digest: digest of its chunks' hashes.
            target: exists only when it is complete.

        Raises:
            CommunicationError: the data differs from its announcement.
        """
        end = _now() + deadline_s

        def wrong(what: str) -> CommunicationError:
            fix = "check the disk of the hub"
            return CommunicationError(f"{place}: {what}", where=str(self.line), fix=fix)

        most = MOST_BYTES + _CHUNK_TEXT * num_chunks(size_bytes)
        hashes = (await self.ask(f"{place}/hashes", _Hashes, deadline_s, most_bytes=most)).root
        if len(hashes) != num_chunks(size_bytes) or digest_of(hashes) != digest:
            raise wrong("the hashes of its chunks do not match its digest")
        partial = target.with_name(f"{target.name}.partial")
        have = await asyncio.to_thread(hash_chunks, partial) if partial.exists() else []
        missing = [i for i, sha256 in enumerate(hashes) if have[i : i + 1] != [sha256]]
        handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o600)

        async def receive(index: int) -> None:
            start, size = index * CHUNK_BYTES, chunk_size(size_bytes, index)
            for _ in range(_WRONG_HASHES):
                data = await self._until(
                    lambda: self._fetch(place, start, size), end - _now(), f"GET {place}"
                )
                if hashlib.sha256(data).hexdigest() == hashes[index]:
                    await asyncio.to_thread(os.pwrite, handle, data, start)
                    return
            raise wrong(f"chunk {index} was wrong {_WRONG_HASHES} times")

        try:
            os.ftruncate(handle, size_bytes)
            await in_parallel(receive, missing)
            await asyncio.to_thread(os.fsync, handle)
        finally:
            os.close(handle)
        partial.replace(target)

    async def _fetch(self, path: str, start: int, size: int) -> bytes:
        # Requested data arrives at full link speed, so request it only when the limit allows.
        await asyncio.sleep(self.down.delay(size))
        headers = {"Range": f"bytes={start}-{start + size - 1}"}
        async with self._request("GET", path, headers=headers) as response:
            if response.status != 206 and start:
                raise _TryAgain("the hub sends a file from its beginning")
            connection = response.connection
            transport = connection.transport if connection is not None else None
            data = await read_body(response.content, transport, size)
        self.down.total += size
        return data

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, patience_s: float = 0.0, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=_SILENT_S + patience_s)
        # The hub never redirects; a redirect could lead to a service of this machine.
        async with self._session.request(
            method, path, timeout=timeout, allow_redirects=False, **options
        ) as response:
            if response.status not in (200, 204, 206):
                body = await _read(response, _ERROR_BYTES)
                try:
                    error = ErrorBody.model_validate_json(body)
                except ValidationError:
                    error = ErrorBody(kind="http", what=f"HTTP status {response.status}")
                what, fix = error.what[:_MOST_LETTERS], error.fix[:_MOST_LETTERS]
                if response.status in _TRY_AGAIN:
                    raise _TryAgain(what)
                raise HubRefusal(error.kind, what, where=str(self.line), fix=fix)
            yield response

    async def _until(self, attempt: Callable[[], Awaitable[R]], deadline_s: float, what: str) -> R:
        end = _now() + deadline_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout_at(end):
                    return await attempt()
            except aiohttp.ServerFingerprintMismatch as error:
                raise HubRefusal(
                    "certificate",
                    "the certificate of the server has sha256 {}, but the join line has {}".format(
                        *apart(error.got.hex(), error.expected.hex())
                    ),
                    where=str(self.line),
                    fix="use the hub's current join line; if it is current, somebody intercepts "
                    "the connection between the hub and this machine",
                ) from None
            except (aiohttp.ClientError, OSError, EOFError, TimeoutError, _TryAgain) as error:
                last = str(error) or type(error).__name__
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            delay_s = pause_s * random.uniform(0.5, 1.0)
            if _now() + delay_s >= end:
                asked = _SECRET.sub("…", what)
                raise DeadlineError(
                    f"{asked} failed for {deadline_s:.0f} s; the last error was {last}",
                    where=str(self.line),
                    fix="check that the hub is running and that this machine can reach it "
                    f"(curl -k {self.line.url}/v1/status answers 401)",
                    id="hub.silent",
                )
            await asyncio.sleep(delay_s)


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            raise _TryAgain(f"HTTP status {response.status} with more than {most_bytes} bytes")
    return bytes(body)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def in_parallel(
    work: Callable[[int], Awaitable[None]], indices: Sequence[int], at_once: int = _AT_ONCE
) -> None:
    """Do work for each index, several at a time; the first failure cancels all, and is raised."""
    left = iter(indices)

    async def worker() -> None:
        for index in left:
            await work(index)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(indices))):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _make_socket(info: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    # Sending fails within half a minute if the other end is gone without notice.
    made = socket.socket(*info[:3])
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    return made

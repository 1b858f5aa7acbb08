"""The memory that requests and answers take: a budget for each sender and for all together.

A sender is a member, by the id that only it and the hub know. If a request has no id, the sender is
its address. So a member that fills its own share does not make other members wait.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import web

from isles.outer.hub.rules import Refusal
from isles.run.unauthenticated import network

SMALL_BYTES = 2**16
"""Size up to which bodies are not counted: the number of connections is limited."""
_EACH_BYTES, _ALL_BYTES, _OWN_BYTES = 16 * 2**20, 128 * 2**20, 4 * 2**20
"""Memory for one sender, for all senders, and guaranteed memory for each member."""
_MOST_WAITING, _WAITS_S, _LOOK_S = 64, 60.0, 1.0
"""Maximum number of a sender's requests that wait for memory, and their longest wait."""
_SLOW_S = 20.0
"""A transfer may take longer if no request waits for its memory."""
_ANSWER_S, _LEAST_BYTES_PER_S = 30.0, 2**18
_MOST_POLLS = 16
_PIECE_BYTES = 2**17
_FRESH_S, _MOST_VERSIONS = 0.5, 2
_KNOWN_S = 10.0
"""Seconds that the hub remembers that an id belongs to a member."""

_ID = re.compile(r"[0-9a-f]{32}")
MEMBER = "X-Member"
"""The header with the id of the requesting member."""


def address_of(request: web.Request) -> str:
    """The sender of a request without an id."""
    return f"at {network(request.remote)}"


@dataclass(eq=False)
class _Hold:
    sender: str
    num_bytes: int
    since: float
    limit: asyncio.Timeout


class Traffic:
    """The memory that each sender holds or waits for, in one event loop.

    Args:
        is_member: tells whether an id belongs to a member.
        clusters: the number of clusters that may take part.
    """

    def __init__(self, is_member: Callable[[str], Awaitable[bool]], clusters: int) -> None:
        self._is_member = is_member
        self._most_bytes = _ALL_BYTES + clusters * _OWN_BYTES
        self._holds: dict[_Hold, None] = {}  # oldest first
        self._held: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._freed = asyncio.Condition()
        self._polls: dict[str, list[Poll]] = {}
        self._known: dict[str, float] = {}
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def sender(self, request: web.Request) -> str:
        """The sender of a request: a member's id, or an address."""
        member_id = request.match_info.get("id") or request.headers.get(MEMBER) or ""
        if _ID.fullmatch(member_id) and await self._is_known(member_id):
            return member_id
        return address_of(request)

    async def _is_known(self, member_id: str) -> bool:
        now = asyncio.get_running_loop().time()
        if self._known.get(member_id, 0.0) > now:
            return True
        if not await self._is_member(member_id):
            return False
        self._known = {each: until for each, until in self._known.items() if until > now}
        self._known[member_id] = now + _KNOWN_S
        return True

    def turn(self, sender: str) -> asyncio.Lock:
        """Lock of a sender while the hub's journal works for it: one request at a time."""
        return self._turns.setdefault(sender, asyncio.Lock())

    @property
    def num_bytes(self) -> int:
        """Memory of all senders together, in bytes."""
        return sum(self._held.values())

    @asynccontextmanager
    async def holding(self, sender: str, num_bytes: int, within_s: float) -> AsyncIterator[None]:
        """Wait until there is room for `num_bytes`, and hold them for at most `within_s`.

        Raises:
            Refusal: the memory was full for a minute.
            TimeoutError: `within_s` is over, or another request waits for this memory.
        """
        await self._wait(sender, num_bytes)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s) as limit:
                hold = _Hold(sender, num_bytes, loop.time(), limit)
                self._holds[hold] = None
                try:
                    yield
                finally:
                    del self._holds[hold]
        finally:
            self._held[sender] -= num_bytes
            if not self._held[sender]:
                del self._held[sender]
            if self._waiting:
                async with self._freed:
                    self._freed.notify_all()

    def _has_room(self, sender: str, num_bytes: int) -> bool:
        own = self._held.get(sender, 0) + num_bytes
        if own > max(_EACH_BYTES, num_bytes):
            return False
        has_own = own <= _OWN_BYTES and _ID.fullmatch(sender)
        most = self._most_bytes if has_own else _ALL_BYTES
        return self.num_bytes + num_bytes <= most

    async def _wait(self, sender: str, num_bytes: int) -> None:
        if not self._has_room(sender, num_bytes):
            if self._waiting.get(sender, 0) >= _MOST_WAITING:
                raise _busy()
            self._waiting[sender] = self._waiting.get(sender, 0) + 1
            try:
                async with asyncio.timeout(_WAITS_S), self._freed:
                    while not self._has_room(sender, num_bytes):
                        self._end_slow(sender, num_bytes)
                        with suppress(TimeoutError):
                            async with asyncio.timeout(_LOOK_S):
                                await self._freed.wait()
            except TimeoutError:
                raise _busy() from None
            finally:
                self._waiting[sender] -= 1
                if not self._waiting[sender]:
                    del self._waiting[sender]
        self._held[sender] = self._held.get(sender, 0) + num_bytes

    def _end_slow(self, sender: str, num_bytes: int) -> None:
        # The oldest transfer: of the waiting sender itself, if that holds too much.
        is_own = self._held.get(sender, 0) + num_bytes > _EACH_BYTES
        now = asyncio.get_running_loop().time()
        for hold in self._holds:
            if now - hold.since < _SLOW_S:
                break
            if (hold.sender == sender or not is_own) and not hold.limit.expired():
                hold.limit.reschedule(now)
                break

    # Answers.

    async def send(self, request: web.Request, response: web.StreamResponse) -> None:
        """Write the rest of an answer, within a time derived from its size.

        Raises:
            ConnectionError: the other end does not read the answer.
        """
        if response.prepared:  # and written: see `answering`
            return
        num_bytes = response.content_length or 0
        if num_bytes <= SMALL_BYTES or (isinstance(response, PacedResponse) and response.is_shared):
            async with self._in_time(request), asyncio.timeout(_time_s(num_bytes)):
                await write(request, response)
            return
        sender = await self.sender(request)
        async with self.answering(request, sender, num_bytes, _time_s(num_bytes)):
            await write(request, response)

    @asynccontextmanager
    async def answering(
        self, request: web.Request, sender: str, num_bytes: int, within_s: float
    ) -> AsyncIterator[None]:
        """Make and write an answer of `num_bytes`; see `holding`.

        Raises:
            ConnectionError: the other end does not read the answer.
        """
        async with self._in_time(request), self.holding(sender, num_bytes, within_s):
            yield

    @asynccontextmanager
    async def _in_time(self, request: web.Request) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("an answer was not read in time") from None

    # Long polls.

    @asynccontextmanager
    async def polling(self, sender: str) -> AsyncIterator[Poll]:
        """Hold an answer back. If a sender has too many, its oldest answer is sent now."""
        poll, polls = Poll(), self._polls.setdefault(sender, [])
        polls.append(poll)
        if len(polls) > _MOST_POLLS:
            polls.pop(0).end()
        try:
            yield poll
        finally:
            if poll in polls:
                polls.remove(poll)
            if not polls and self._polls.get(sender) is polls:
                del self._polls[sender]


class Poll:
    """An answer that is held back."""

    def __init__(self) -> None:
        self.is_over = False
        self._task: asyncio.Task[Any] | None = None

    def end(self) -> None:
        """Answer now."""
        self.is_over = True
        if self._task is not None:
            self._task.cancel()

    async def wait(self, changed: asyncio.Event, within_s: float) -> None:
        """Wait for a change or the end, for at most `within_s`."""
        self._task = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait({self._task}, timeout=within_s)
        finally:
            self._task.cancel()
            self._task = None


class PacedResponse(web.StreamResponse):
    """A long answer: each piece is written after the other end has read the previous piece.

    TLS copies every write whole, so one large write would hold the answer twice.

    Args:
        is_shared: whether others read it too, so that no sender holds it.
    """

    def __init__(
        self,
        body: bytes,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(status=status, headers=headers or {"Content-Type": "application/json"})
        self.content_length, self.is_shared = len(body), is_shared
        self._rest = memoryview(body)

    async def write_eof(self, data: bytes = b"") -> None:
        while self._rest:
            piece, self._rest = self._rest[:_PIECE_BYTES], self._rest[_PIECE_BYTES:]
            await self.write(piece)
        self._rest = memoryview(b"")  # a connection keeps its last answer
        await super().write_eof(data)


class Shared:
    """A large answer, shared by all requests within a short time.

    While slow readers keep two older versions in memory, no newer version is made.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        self._make, self._lock = make, asyncio.Lock()
        self._made: list[_Made] = []

    @asynccontextmanager
    async def newest(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        async with self._lock:
            made = self._made
            is_old = not made or loop.time() - made[-1].at > _FRESH_S
            if is_old and sum(each.readers > 0 for each in made) < _MOST_VERSIONS:
                # Not as a request of its sender: then all would wait for the sender's other
                # requests.
                making = asyncio.create_task(self._make(), context=Context())
                made.append(_Made(await making, loop.time()))
                self._made = made = [each for each in made if each.readers or each is made[-1]]
            last = made[-1]
            last.readers += 1
        try:
            yield last.body
        finally:
            last.readers -= 1


@dataclass(eq=False)
class _Made:
    body: bytes
    at: float
    readers: int = 0


async def write(request: web.Request, response: web.StreamResponse) -> None:
    """Write an answer. The caller sets the time limit, as `Traffic.answering` does."""
    await response.prepare(request)
    await response.write_eof()


def _time_s(num_bytes: int) -> float:
    return _ANSWER_S + num_bytes / _LEAST_BYTES_PER_S


def _busy() -> Refusal:
    return Refusal("busy", "too much data is in transfer", "transfer less at a time")

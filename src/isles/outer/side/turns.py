"""The turns as the side process sees them: contributions go out, averages come in, in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from isles.errors import CommunicationError
from isles.outer.client.blobs import digest_of, hash_chunks
from isles.outer.client.client import Client
from isles.outer.client.http import RendezvousRefusal
from isles.outer.link.messages import Committed, Contribute, Event, Note
from isles.outer.messages import TurnAnswer
from isles.outer.side.engine import Exchange, Traffic, patiently
from isles.outer.side.faults import WHO_IS_THERE, NotLetInError, RejoinError
from isles.outer.side.spool import Spool

log = logging.getLogger(__name__)

_AHEAD = 4
"""So many averages lie here at most that have not been applied."""
_WAIT_S = 60.0
_FETCH_S = 3600.0
_SETTLE_S = 20.0
_AGAIN_S = 1.0
_SAID = {"late", "refused", "behind"}


class Turns:
    """Follows the turns from the first one that this cluster has not applied.

    Args:
        group: where its tasks run.
        name: of this cluster.
        control: client for what is said.
        data: client for what is fetched.
        exchange: brings contributions into their turns.
        spool: where averages lie.
        emit: tells rank 0.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        name: str,
        control: Client,
        data: Client,
        exchange: Exchange,
        spool: Spool,
        emit: Callable[[Event], None],
    ) -> None:
        self._group, self._name = group, name
        self._control, self._data = control, data
        self._exchange, self._spool, self._emit = exchange, spool, emit
        self._parts: dict[int, Contribute] = {}
        self._since: dict[int, float] = {}
        self._tasks: dict[int, asyncio.Task[Traffic | None]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self.version = 0
        """Turns that have been applied."""

    def start(self, version: int) -> None:
        """Follow the turns from here on."""
        self.stop()
        self.version = version
        self._spool.tidy(version)
        self._parts = {turn: part for turn, part in self._parts.items() if turn >= version}
        self._follower = self._group.create_task(self._follow())
        for turn in sorted(self._parts):
            self._begin(self._parts[turn])

    def stop(self) -> None:
        """Follow no turn, as long as the outer parameters are not the run's."""
        for task in (self._follower, *self._tasks.values()):
            if task is not None:
                task.cancel()
        self._tasks.clear()
        self._follower = None

    def forget(self) -> None:
        """Contributions that were made of other outer parameters are void."""
        for part in self._parts.values():
            part.path.unlink(missing_ok=True)
        self._parts.clear()

    def contribute(self, part: Contribute) -> None:
        """A contribution lies in the spool."""
        self._parts[part.turn] = part
        if self._follower is not None:
            self._begin(part)

    def _begin(self, part: Contribute) -> None:
        self._since.setdefault(part.turn, asyncio.get_running_loop().time())
        self._tasks[part.turn] = self._group.create_task(self._take_part(part))

    def has_contributed(self, turn: int) -> bool:
        """Whether a contribution to a turn lies in the spool."""
        return turn in self._parts

    def applied(self, turn: int) -> None:
        """An average has been applied."""
        self.version = turn + 1
        for late in [other for other in self._parts if other <= turn]:
            # It came after the turn was decided; `tidy` removes the file.
            del self._parts[late]
            if (task := self._tasks.pop(late, None)) is not None:
                task.cancel()
        self._spool.tidy(self.version)
        self._room.set()

    async def _take_part(self, part: Contribute) -> Traffic | None:
        """Bring a contribution into its turn; None: it is not in it."""
        while True:
            try:
                return await self._exchange.take_part(part)
            except RendezvousRefusal as error:
                if error.kind == "unknown":
                    raise RejoinError(error.what) from error
                if error.kind in _SAID:
                    self._emit(Note(text=error.what, is_warning=error.kind != "late"))
                    return None
                if error.kind != "early" and error.kind not in WHO_IS_THERE:
                    raise NotLetInError(error) from error
                await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        """Fetch one average after the other, as far as rank 0 keeps up."""
        turn = self.version
        while True:
            while turn >= self.version + _AHEAD:
                self._room.clear()
                await self._room.wait()
            answer = await self._committed(turn)
            traffic = await self._settle(answer)
            loop = asyncio.get_running_loop()
            before, started = self._data.channel.received_bytes, loop.time()
            path = self._spool.average(turn) if answer.size_bytes else None
            if path is not None:
                await self._bring(answer, path)
            else:
                self._spool.average(turn).touch()  # nothing is missing: see `Spool.has`
            part, since = self._parts.pop(turn, None), self._since.pop(turn, None)
            self._emit(
                Committed(
                    turn=turn,
                    path=path,
                    digest=answer.digest,
                    is_in=self._name in answer.weights,
                    weights=answer.weights,
                    refused=answer.refused,
                    size_bytes=answer.size_bytes,
                    sent_bytes=traffic.sent_bytes,
                    received_bytes=traffic.received_bytes
                    + self._data.channel.received_bytes
                    - before,
                    send_s=traffic.seconds,
                    receive_s=loop.time() - started,
                    waited_s=0.0 if since is None else loop.time() - since,
                )
            )
            if part is not None:
                part.path.unlink(missing_ok=True)
            turn += 1

    async def _committed(self, turn: int) -> TurnAnswer:
        """Wait until a turn is committed, and say now and then whom it waits for."""
        while True:
            try:
                return await self._control.wait_turn(turn, _WAIT_S)
            except RendezvousRefusal as error:
                log.warning("%s", error.what)
                await asyncio.sleep(_AGAIN_S)
            except CommunicationError as error:
                log.info("%s", error.what)
                if turn in self._parts and "it waits for" in error.what:
                    self._emit(Note(text=error.what, is_warning=True))

    async def _settle(self, answer: TurnAnswer) -> Traffic:
        """End what is left of the own contribution to a turn that is committed."""
        task = self._tasks.pop(answer.turn, None)
        if task is None:
            return Traffic(0, 0, 0.0)
        if self._name in answer.weights:
            # It is about to find out, and to put the average where it belongs.
            await asyncio.wait({task}, timeout=_SETTLE_S)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            return Traffic(0, 0, 0.0)
        return task.result() or Traffic(0, 0, 0.0)

    async def _bring(self, answer: TurnAnswer, path: Path) -> None:
        """Have an average in the spool."""
        while True:
            if path.exists():
                if digest_of(await asyncio.to_thread(hash_chunks, path)) == answer.digest:
                    return
                path.unlink()
            await asyncio.to_thread(self._spool.take_over, answer.turn, answer.digest)
            if path.exists():
                return
            try:
                await patiently(lambda: self._data.fetch_average(answer, path, _FETCH_S))
            except RendezvousRefusal as error:
                if error.kind == "unknown":
                    raise RejoinError(error.what) from error
                # It is not kept any more: with the next sign of life comes the order to pull.
                log.info("%s", error.what)
                await asyncio.sleep(_AGAIN_S)

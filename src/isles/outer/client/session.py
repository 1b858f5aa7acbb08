"""A cluster's conversation with the hub: joins, gives heartbeats, contributes, brings averages.

It runs in a thread of rank 0 (`link.py`), in one event loop; all that is here belongs to that loop.
Where the hub has forgotten this cluster it joins anew, and says again what is not decided yet.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from isles.errors import CommunicationError, ConfigError, UserError
from isles.outer.client.api import Client
from isles.outer.client.events import (
    Behind,
    Claimed,
    Donate,
    Ended,
    Event,
    Interval,
    Joined,
    LinkSettings,
    Member,
    Members,
    Note,
    Progress,
    Refused,
    RendezvousFound,
    RendezvousLost,
    Reset,
    SamplesLost,
    Sent,
    TurnDue,
)
from isles.outer.client.http import WHO_IS_THERE, NotLetInError, RejoinError, RendezvousRefusal
from isles.outer.client.transfer import Spool, Turns, patiently, pull_state
from isles.outer.messages import Beat, BeatAnswer, Join
from isles.outer.samples import joined, without
from isles.run.join_line import JoinLine

if TYPE_CHECKING:  # an extra
    from isles.outer.hivemind.host import Node

log = logging.getLogger(__name__)

R = TypeVar("R")

_CONTROL_CONNECTIONS = 14
_JOIN_S, _BEAT_S, _MOMENT_S = 5.0, 5.0, 0.25
_ASK_S, _FOREVER_S, _LEAVE_S = 60.0, 1e9, 5.0
_WHOLE_S, _PATIENCE_S, _LOOK_S = 24 * 3600.0, 90.0, 2.0
_PAUSE_S, _LONGEST_PAUSE_S, _HEALTHY_S = 0.5, 30.0, 20.0
_ON_THE_WIRE = 1.05
"""Bytes on the wire for each of a file: TLS, HTTP and TCP have theirs."""
_WILL_PASS = {"name_taken", "full"}
"""Refusals that a cluster meets which was started again before its former self was given up."""


class _Left(Exception):
    pass


class Session:
    """What a cluster has said to the hub and heard of it, and the tasks that go on with it.

    Args:
        member: who this cluster is.
        settings: how it reaches the hub.
        join_file: holds the join line; engine hivemind makes its own.
        spool: where files lie.
        version: turns applied.
        outer_params: digest of each fragment's outer parameters.
        holding: samples that are in no average.
        emit: tells rank 0.
    """

    def __init__(
        self,
        member: Member,
        settings: LinkSettings,
        join_file: Path,
        spool: Spool,
        version: int,
        outer_params: Sequence[str],
        holding: Sequence[Interval],
        emit: Callable[[Event], None],
    ) -> None:
        self._member, self._settings, self._join_file = member, settings, join_file
        self._spool, self._emit = spool, emit
        self._outer_params = list(outer_params)
        self._holding = joined(holding)
        """Samples of this cluster that no average has."""
        self.turns = Turns(member.name, spool, version, emit, self._is_averaged)
        self.progress = Progress()
        self.is_connected = False
        self.members: tuple[str, ...] = ()
        self.pace = 0
        self._wanted: list[int] = []
        """Claims of samples that are not answered."""
        self._has_claims, self._left = asyncio.Event(), asyncio.Event()
        self._reports = asyncio.Queue[tuple[int, str]]()
        self._order = self._obeyed = ""
        self._has_joined = False
        self._lost_at: float | None = None
        self._node: Node | None = None
        self._leaves: bool | None = None
        self._moved_before = (0, 0)
        self._data: Client | None = None
        self._giving: asyncio.Task[None] | None = None

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent to the hub, and received from it."""
        sent, received = self._moved_before
        if self._data is not None:
            sent += self._data.channel.sent_bytes
            received += self._data.channel.received_bytes
        return sent, received

    # What rank 0 says.

    def contribute(self, part: Sent) -> None:
        """A contribution lies in the spool."""
        self.turns.contribute(part)

    def applied(self, turn: int, digest: str) -> None:
        """An average has been applied."""
        self._outer_params[turn % len(self._outer_params)] = digest
        self._spool.note_outer_params(turn, digest)
        self.turns.applied(turn)
        self._reports.put_nowait((turn, digest))

    def claim(self, num_samples: int) -> None:
        """Samples are needed."""
        self._wanted.append(num_samples)
        self._has_claims.set()

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        """The state for a cluster that asked for it lies in the spool."""
        if self._data is not None and (self._giving is None or self._giving.done()):
            self._giving = self._group.create_task(
                self._give(self._data, version, paths, outer_params)
            )

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        """Another cluster's state was taken over; contributions under way are void."""
        self._outer_params = list(outer_params)
        self.turns.forget(version)
        shutil.rmtree(self._spool.pulled, ignore_errors=True)
        if self._data is not None:
            self._group.create_task(self._join())

    def obeyed(self) -> None:
        """The weights are the outer parameters again, as `Reset` has told."""
        self._obeyed = self._order

    def leave(self, *, tells: bool, has_finished: bool) -> None:
        """End.

        Args:
            tells: say so to the hub, so that nobody waits for this cluster.
            has_finished: the training is over; else it pauses.
        """
        self._leaves = has_finished if tells else None
        self._left.set()

    # The life of the session.

    async def run(self) -> None:
        """Work until `leave`, or until the hub says no for good; whatever fails is begun again."""
        try:
            await self._run()
        finally:
            if self._node is not None:
                await self._node.close(waits=bool(self._leaves))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _PAUSE_S
        while True:
            started = loop.time()
            error = await self._live()
            match error:
                case _Left():
                    return
                case NotLetInError():
                    refusal = error.refusal
                    self._emit(_refused(refusal.kind, refusal))
                    return
                case ConfigError():
                    self._emit(_refused("join_line", error))
                    return
                case RejoinError():
                    log.info("to join anew: %s", error)
                case _:
                    log.error("what speaks with the hub has failed", exc_info=error)
                    text = f"what speaks with the rendezvous has failed: {error!r}; it begins anew"
                    self._emit(Note(text=text, is_warning=True))
            is_healthy = loop.time() - started > _HEALTHY_S
            pause_s = _PAUSE_S if is_healthy else min(2 * pause_s, _LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), pause_s)
                return

    async def _live(self) -> BaseException:
        try:
            if self._settings.hivemind is not None:
                await self._begin_node()
            await self._take_part()
        except Exception as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return error
        finally:
            self._moved_before, self._data = self.moved, None
        raise AssertionError("a session ends by an exception")

    async def _begin_node(self) -> None:
        if self._node is None:
            from isles.outer.hivemind.host import Node

            assert self._settings.hivemind is not None
            name, spool, turns = self._member.name, self._spool, self.turns
            folder = spool.folder / "hivemind"
            self._node = Node(self._settings.hivemind, name, folder, spool, turns, self._emit)
            self._join_file = await self._node.open_door()
        self._node.begin()

    async def _take_part(self) -> None:
        line = JoinLine.read(self._join_file)
        rate = self._settings.max_bytes_per_s / _ON_THE_WIRE
        member_id = self._member.member_id
        data = Client(
            line,
            member_id,
            connections=self._settings.connections,
            up_bytes_per_s=rate,
            down_bytes_per_s=rate,
        )
        self._control = control = Client(line, member_id, connections=_CONTROL_CONNECTIONS)
        self._joining, self._claiming = asyncio.Lock(), asyncio.Lock()
        self._beat_s = self._settings.beat_s
        self._is_behind = self._has_obeyed = False
        self._giving, self._asked_at = None, -_ASK_S
        async with control, data, asyncio.TaskGroup() as group:
            self._group, self._data = group, data
            group.create_task(self._watch(line))
            self.turns.begin(group, control, data, self._check, is_movable=self._node is not None)
            group.create_task(self._join_and_go_on())
            await self._left.wait()
            if self._leaves is not None:
                await self._say_goodbye()
            raise _Left

    async def _join_and_go_on(self) -> None:
        await self._join()
        for task in (self._beat(), self._claim(), self._report()):
            self._group.create_task(task)

    async def _say_goodbye(self) -> None:
        assert self._leaves is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reports.join(), _LEAVE_S)
        try:
            await self._control.leave(_LEAVE_S, has_finished=self._leaves)
        except CommunicationError as error:
            log.info("%s", error.what)
        if self._leaves:
            self._spool.since = self.turns.version
            self._spool.tidy(self.turns.version)

    async def _watch(self, line: JoinLine) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            with suppress(ConfigError):
                if JoinLine.read(self._join_file) != line:
                    raise RejoinError("there is a new join line")
            if self._node is not None:
                self._node.check()

    def _check(self, error: RendezvousRefusal) -> None:
        if error.kind == "unknown":
            raise RejoinError(error.what) from error
        if error.kind not in WHO_IS_THERE:
            raise NotLetInError(error) from error

    # Joining, and heartbeats.

    async def _join(self) -> None:
        async with self._claiming, self._joining:
            version = self.turns.version
            join = Join(
                id=self._member.member_id,
                name=self._member.name,
                identity=self._member.identity,
                codec=self._member.codec,
                pieces=self._member.pieces,
                version=version,
                has=self._spool.has(version),
                outer_params=self._outer_params,
                holding=self._holding,
            )
            answer = await self._ask(lambda: self._control.join(join, _JOIN_S))
            dead_after_s = float(answer.settings.get("dead_after_s", 4 * self._beat_s))
            self._beat_s = min(self._settings.beat_s, dead_after_s / 4)
            self._has_joined, self._is_behind = True, False
            self.is_connected = True
            if self._node is not None:
                self._node.has_joined()
            self._emit(
                Joined(standing=answer.standing, turn=answer.turn, from_turn=answer.from_turn)
            )
            # What was contributed is counted there, or comes back with a refusal.
            lost = without(answer.lost, self.turns.pending_samples)
            if lost:
                self._holding = without(self._holding, lost)
                self._emit(SamplesLost(samples=tuple(lost)))
            if answer.standing == "behind":
                self._fall_behind(answer.why)
            else:
                self.turns.start()

    async def _ask(self, call: Callable[[], Awaitable[R]]) -> R:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            try:
                answer = await call()
            except RendezvousRefusal as error:
                if error.kind == "ahead" and self._node is not None:
                    self._node.knows_more()
                    raise RejoinError(error.what) from error
                is_early = error.kind in _WILL_PASS and loop.time() - started < _PATIENCE_S
                is_known = self._has_joined and error.kind in WHO_IS_THERE
                if not (is_early or is_known):
                    raise NotLetInError(error) from error
                self._is_lost(error.what)
                await asyncio.sleep(self._beat_s)
            except CommunicationError as error:
                self._is_lost(error.what)
            else:
                self._is_found()
                return answer

    def _is_lost(self, why: str) -> None:
        if self._lost_at is None:
            self._lost_at = asyncio.get_running_loop().time()
            why = why if self._node is None else self._node.explain(why)
            self.is_connected = False
            self._emit(RendezvousLost(why=why))

    def _is_found(self) -> None:
        if self._lost_at is not None:
            away_s = asyncio.get_running_loop().time() - self._lost_at
            self._lost_at = None
            self.is_connected = True
            self._emit(RendezvousFound(away_s=away_s))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            async with self._joining:  # an answer from before joining anew would say "pull" again
                await self._beat_once()
            await asyncio.sleep(_MOMENT_S)
            while not self.progress.ends and loop.time() - started < self._beat_s:
                await asyncio.sleep(_MOMENT_S)

    async def _beat_once(self) -> None:
        version, (sent_bytes, received_bytes) = self.turns.version, self.moved
        beat = Beat(
            id=self._member.member_id,
            version=version,
            has=self._spool.has(version),
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            **asdict(self.progress),
        )
        try:
            self._heed(await self._control.beat(beat, _BEAT_S))
            if self._has_obeyed:
                self._has_obeyed = False
                await self._control.obeyed(_BEAT_S)
        except RendezvousRefusal as error:
            if error.kind == "unknown":
                raise RejoinError(error.what) from error
            self._is_lost(error.what)
        except CommunicationError as error:
            self._is_lost(error.what)
        else:
            self._is_found()

    def _heed(self, answer: BeatAnswer) -> None:
        self.pace = answer.pace
        if tuple(answer.members) != self.members:
            self.members = tuple(answer.members)
            self._emit(Members(names=self.members))
        for turn in answer.open:
            if turn.due_in_s is None or self._is_behind:
                continue
            waits_for = tuple(turn.waits_for)
            if self._member.name in waits_for and turn.turn not in self.turns.parts:
                self._emit(TurnDue(turn=turn.turn, due_in_s=turn.due_in_s, waits_for=waits_for))
        if answer.order == "pull":
            self._fall_behind(answer.order_reason)
        elif answer.order == "reset" and answer.order_reason == self._obeyed:
            self._has_obeyed = True
        elif answer.order == "reset" and answer.order_reason != self._order:
            self._order = answer.order_reason
            self._emit(Reset(why=answer.order_reason))
        if answer.ended is not None:
            self._emit(Ended(turns=answer.ended))
        now = asyncio.get_running_loop().time()
        is_giving = self._giving is not None and not self._giving.done()
        if answer.donate and not is_giving and now - self._asked_at >= _ASK_S:
            self._asked_at = now
            self._emit(Donate())

    # Samples, and what was applied.

    async def _claim(self) -> None:
        while True:
            while not self._wanted:
                self._has_claims.clear()
                await self._has_claims.wait()
            async with self._claiming:
                try:
                    found = await self._control.claim(self._wanted[0], _FOREVER_S)
                except RendezvousRefusal as error:
                    raise RejoinError(error.what) from error
                self._wanted.pop(0)
                self._holding = joined([*self._holding, *found])
            self._emit(Claimed(samples=tuple(found)))

    def _is_averaged(self, samples: Sequence[Interval]) -> None:
        self._holding = without(self._holding, samples)

    async def _report(self) -> None:
        while True:
            turn, digest = await self._reports.get()
            try:
                await patiently(lambda: self._control.applied(turn, digest, _ASK_S))  # noqa: B023
            except RendezvousRefusal as error:
                if error.kind == "unknown":
                    raise RejoinError(error.what) from error
                log.warning("%s", error.what)
            finally:
                self._reports.task_done()

    # States.

    def _fall_behind(self, why: str) -> None:
        if not self._is_behind:
            self._is_behind = True
            self.turns.stop()
            self._emit(Behind(why=why))
            assert self._data is not None
            pulling = pull_state(self._data, self._spool, self._check, self._emit)
            self._group.create_task(pulling)

    async def _give(
        self, data: Client, version: int, paths: Sequence[Path], outer_params: Sequence[str]
    ) -> None:
        try:
            await patiently(lambda: data.give_state(version, outer_params, paths, _WHOLE_S))
        except RendezvousRefusal as error:
            if error.kind == "unknown":
                raise RejoinError(error.what) from error
            self._emit(Note(text=f"the state given to another cluster was refused: {error.what}"))
        self._asked_at = -_ASK_S


def _refused(reason: str, error: UserError) -> Refused:
    return Refused(reason=reason, what=error.what, where=error.where, fix=error.fix)

"""The side process: joins, gives signs of life, passes on what rank 0 and the rendezvous say."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar, assert_never

from isles.errors import CommunicationError, ConfigError
from isles.outer.client.client import Client
from isles.outer.client.http import RendezvousRefusal
from isles.outer.link.messages import (
    Adopted,
    Alive,
    AppliedTurn,
    Begin,
    Behind,
    Claimed,
    ClaimSamples,
    Command,
    Contribute,
    Ended,
    Event,
    GiveState,
    Interval,
    Joined,
    KeepSince,
    Leave,
    Members,
    Note,
    Obeyed,
    Progress,
    RendezvousFound,
    RendezvousLost,
    Reset,
    SamplesLost,
    TurnDue,
)
from isles.outer.messages import Beat, BeatAnswer, Join
from isles.outer.side.engine import Exchange, limited, patiently
from isles.outer.side.engine_hub import HubExchange
from isles.outer.side.faults import WHO_IS_THERE, NotLetInError, RejoinError
from isles.outer.side.spool import Spool
from isles.outer.side.states import States
from isles.outer.side.turns import Turns
from isles.run.join_line import JoinLine

if TYPE_CHECKING:  # an extra
    from isles.outer.hivemind.node import Node

log = logging.getLogger(__name__)

R = TypeVar("R")

_CONTROL_CONNECTIONS = 14
_JOIN_S = 5.0
_BEAT_S, _MOMENT_S = 5.0, 0.25
_ASK_S = 60.0
_FOREVER_S = 1e9
_PATIENCE_S = 90.0
_ALIVE_S = 2.0
_LEAVE_S = 5.0
_WILL_PASS = {"name_taken", "full"}
"""Refusals that a cluster meets which was started again before its former self was given up."""


class Side:
    """One side process.

    Args:
        begin: all that rank 0 knows.
        commands: what it says from now on.
        emit: tells it something.
        node: engine hivemind: this cluster among its peers.
    """

    def __init__(
        self,
        begin: Begin,
        commands: asyncio.Queue[Command],
        emit: Callable[[Event | Alive], None],
        node: Node | None = None,
    ) -> None:
        self._node = node
        self._begin, self._commands, self._emit = begin, commands, emit
        self._member = begin.member
        settings = self._settings = limited(begin.settings)
        self._line = line = JoinLine.read(begin.join_file)
        self._control = Client(line, begin.member.member_id, connections=_CONTROL_CONNECTIONS)
        self._data = Client(
            line,
            begin.member.member_id,
            connections=settings.connections,
            up_bytes_per_s=settings.up_bytes_per_s,
            down_bytes_per_s=settings.down_bytes_per_s,
        )
        self._spool = Spool.of(begin)
        self._progress, self._obeyed = begin.progress, begin.obeyed
        self._claims = asyncio.Queue[ClaimSamples]()
        self._reports = asyncio.Queue[AppliedTurn]()
        self._joining, self._claiming = asyncio.Lock(), asyncio.Lock()
        self._beat_s, self._has_joined = settings.beat_s, begin.has_joined
        self._is_behind = self._has_obeyed = False
        self._lost_at: float | None = None
        self._members: tuple[str, ...] = ()
        self._pace = 0
        self._left = asyncio.Event()
        self._exchange: Exchange | None = None

    async def run(self) -> None:
        """Work until rank 0 says that the training has ended.

        Raises:
            NotLetInError, RejoinError: see there; among others, in a group.
        """
        async with self._control, self._data, asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._live())
            # Some import torch, which takes seconds; rank 0 sees that this process lives.
            self._exchange = exchange = await asyncio.to_thread(self._make_exchange)
            name, spool = self._member.name, self._spool
            self._turns = Turns(group, name, self._control, self._data, exchange, spool, self._emit)
            self._states = States(group, self._data, self._spool, self._emit)
            group.create_task(self._listen())
            group.create_task(self._take_part())
            await self._left.wait()
            await exchange.close()
            os._exit(0)  # whatever still runs here has no purpose any more

    def _make_exchange(self) -> Exchange:
        match self._settings.engine:
            case "hub":
                return HubExchange(self._data)
            case "gloo":
                from isles.outer.gloo.engine import GlooExchange

                relay = HubExchange(self._data)
                return GlooExchange(
                    self._control, relay, self._member, self._settings, self._spool, self._warn
                )
            case "hivemind":
                from isles.outer.hivemind.engine import HivemindExchange

                assert self._node is not None
                clients = (self._control, self._data)
                return HivemindExchange(
                    self._node, clients, self._member, self._settings, self._spool, self._warn
                )
            case _:
                assert_never(self._settings.engine)

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self._emit(Note(text=text, is_warning=True))

    # Rank 0.

    async def _live(self) -> None:
        """Let rank 0 see that this process lives, and end with it."""
        parent = os.getppid()
        while os.getppid() == parent:
            with suppress(ConfigError):
                if JoinLine.read(self._begin.join_file) != self._line:
                    raise RejoinError("there is a new join line")
            sent_bytes, received_bytes = self._moved()
            self._emit(Alive(sent_bytes=sent_bytes, received_bytes=received_bytes))
            await asyncio.sleep(_ALIVE_S)
        os._exit(0)

    def _moved(self) -> tuple[int, int]:
        """Bytes that this process has sent to the rendezvous or other clusters, and received."""
        channel = self._data.channel
        sent, received = (0, 0) if self._exchange is None else self._exchange.moved
        return channel.sent_bytes + sent, channel.received_bytes + received

    async def _listen(self) -> None:
        for claim in self._begin.claims:
            self._claims.put_nowait(claim)
        while True:
            match await self._commands.get():
                case Progress() as progress:
                    self._progress = progress
                case Contribute() as part:
                    self._turns.contribute(part)
                case AppliedTurn() as applied:
                    self._turns.applied(applied.turn)
                    self._reports.put_nowait(applied)
                case ClaimSamples() as claim:
                    self._claims.put_nowait(claim)
                case GiveState() as state:
                    self._states.give(state)
                case Adopted() as adopted:
                    self._turns.forget()
                    self._states.forget_pulled()
                    self._group.create_task(
                        self._join(adopted.version, adopted.outer_params, adopted.holding)
                    )
                case KeepSince() as keep:
                    self._spool.since = keep.version
                case Obeyed() as obeyed:
                    self._obeyed = obeyed.why
                case Leave() as leave:
                    await self._leave(has_finished=leave.has_finished)
                case Begin():
                    raise AssertionError("begun twice")

    async def _leave(self, *, has_finished: bool) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reports.join(), _LEAVE_S)
        try:
            await self._control.leave(_LEAVE_S, has_finished=has_finished)
        except CommunicationError as error:
            log.info("%s", error.what)
        if has_finished:
            self._spool.since = self._turns.version
            self._spool.tidy(self._turns.version)
        self._left.set()

    # The rendezvous.

    async def _take_part(self) -> None:
        """Join, and then do whatever is to be done one after the other."""
        begin = self._begin
        for part in begin.contributions:
            self._turns.contribute(part)
        await self._join(begin.version, begin.outer_params, begin.holding)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            group.create_task(self._claim())
            group.create_task(self._report())

    async def _join(
        self, version: int, outer_params: Sequence[str], holding: Sequence[Interval]
    ) -> None:
        join = Join(
            id=self._member.member_id,
            name=self._member.name,
            identity=self._member.identity,
            codec=self._member.codec,
            pieces=self._member.pieces,
            version=version,
            has=self._spool.has(version),
            outer_params=list(outer_params),
            holding=list(holding),
        )
        async with self._claiming, self._joining:
            answer = await self._ask(lambda: self._control.join(join, _JOIN_S))
            dead_after_s = float(answer.settings.get("dead_after_s", 4 * self._beat_s))
            self._beat_s = min(self._settings.beat_s, dead_after_s / 4)
            self._has_joined, self._is_behind = True, False
            self._emit(
                Joined(standing=answer.standing, turn=answer.turn, from_turn=answer.from_turn)
            )
            if answer.lost:
                self._emit(SamplesLost(samples=tuple(answer.lost)))
            if answer.standing == "behind":
                self._fall_behind(answer.why)
            else:
                self._turns.start(version)

    async def _ask(self, call: Callable[[], Awaitable[R]]) -> R:
        """Join for as long as it takes.

        Raises:
            NotLetInError: the rendezvous says no for good.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            try:
                answer = await call()
            except RendezvousRefusal as error:
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
            log.warning("%s", why)
            self._emit(RendezvousLost(why=why))

    def _is_found(self) -> None:
        if self._lost_at is not None:
            away_s = asyncio.get_running_loop().time() - self._lost_at
            self._lost_at = None
            log.info("the rendezvous answers again after %.1f s", away_s)
            self._emit(RendezvousFound(away_s=away_s))

    async def _beat(self) -> None:
        """Say again and again that this cluster lives, and do what is answered."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            async with self._joining:  # an answer from before joining anew would say "pull" again
                await self._beat_once()
            await asyncio.sleep(_MOMENT_S)
            while not self._progress.ends and loop.time() - started < self._beat_s:
                await asyncio.sleep(_MOMENT_S)

    async def _beat_once(self) -> None:
        try:
            self._heed(await self._control.beat(self._sign(), _BEAT_S))
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

    def _sign(self) -> Beat:
        progress = asdict(self._progress)
        del progress["kind"]
        sent_bytes, received_bytes = self._moved()
        return Beat(
            id=self._member.member_id,
            version=self._turns.version,
            has=self._spool.has(self._turns.version),
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            **progress,
        )

    def _heed(self, answer: BeatAnswer) -> None:
        names = tuple(answer.members)
        if (names, answer.pace) != (self._members, self._pace):
            self._members, self._pace = names, answer.pace
            self._emit(Members(names=names, pace=answer.pace))
        for turn in answer.open:
            if turn.due_in_s is None or self._is_behind:
                continue
            waits_for = tuple(turn.waits_for)
            if self._member.name in waits_for and not self._turns.has_contributed(turn.turn):
                self._emit(TurnDue(turn=turn.turn, due_in_s=turn.due_in_s, waits_for=waits_for))
        match answer.order:
            case "pull":
                self._fall_behind(answer.order_reason)
            case "reset" if answer.order_reason == self._obeyed:
                self._has_obeyed = True
            case "reset":
                self._emit(Reset(why=answer.order_reason))
            case "":
                pass
            case _:
                assert_never(answer.order)
        if answer.ended is not None:
            self._emit(Ended(turns=answer.ended))
        if answer.donate:
            self._states.ask()
        if answer.upload_average is not None:
            self._states.lend(answer.upload_average)

    def _fall_behind(self, why: str) -> None:
        if not self._is_behind:
            self._is_behind = True
            self._turns.stop()
            self._emit(Behind(why=why))
            self._group.create_task(self._states.pull())

    async def _claim(self) -> None:
        while True:
            claim = await self._claims.get()
            async with self._claiming:
                try:
                    found = await self._control.claim(claim.num_samples, _FOREVER_S)
                except RendezvousRefusal as error:
                    raise RejoinError(error.what) from error
            self._emit(Claimed(number=claim.number, samples=tuple(found)))

    async def _report(self) -> None:
        while True:
            applied = await self._reports.get()
            try:
                await patiently(
                    partial(self._control.applied, applied.turn, applied.digest, _ASK_S)
                )
            except RendezvousRefusal as error:
                if error.kind == "unknown":
                    raise RejoinError(error.what) from error
                log.warning("%s", error.what)
            self._reports.task_done()

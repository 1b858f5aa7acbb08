"""A cluster's conversation with the hub: joins, gives heartbeats, leases samples, sends states.

It runs in a thread of rank 0 (`client.py`), in one event loop, which all that is here belongs to.
Where the hub has forgotten this cluster it joins anew, and sends again what is not decided yet.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from isles.errors import CommunicationError, ConfigError, UserError
from isles.facts.units import format_duration
from isles.outer.client.api import HubApi
from isles.outer.client.http import WHO_IS_THERE, HubRefusal
from isles.outer.client.transfer import Spool, Transfers, until_answered
from isles.outer.hivemind import HivemindSettings
from isles.outer.messages import (
    Command,
    End,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Lease,
    Reset,
    Revoke,
    SendState,
)
from isles.outer.samples import Interval, joined, without
from isles.run.join_line import JoinLine

log = logging.getLogger(__name__)

R = TypeVar("R")

_CONTROL_CONNECTIONS = 14
_JOIN_S, _HEARTBEAT_S, _MOMENT_S = 5.0, 5.0, 0.25
_ASK_S, _FOREVER_S, _LEAVE_S = 60.0, 1e9, 5.0
_PATIENCE_S, _LOOK_S = 90.0, 2.0
_PAUSE_S, _LONGEST_PAUSE_S, _HEALTHY_S = 0.5, 30.0, 20.0
_ON_THE_WIRE = 1.05
"""Bytes on the wire for each of a file: TLS, HTTP and TCP have theirs."""
_WILL_PASS = {"name_taken", "full"}
"""Refusals that a cluster meets which was started again before its former self was given up."""


@dataclass(slots=True)
class HubState:
    """What is known of the hub. The client's thread writes it, rank 0 reads it.

    Args:
        members: the clusters that take part now, this one too.
        sync_every: inner steps that the slowest link of all asks for; 0: not known.
        is_connected: whether the hub answers.
        is_joined: whether it has let this cluster in.
        is_behind: the outer parameters here are not the run's; `Adopt` will come.
        decided: outer steps that were decided before this cluster came: it has no part in them.
        closing: an outer step that will be closed without this cluster, and the seconds left.
        refusal: the hub does not let this cluster in, and never will as things are.
        lost_at: since when the hub does not answer, by `time.monotonic`; None: it does.
        why: what was reported last.
        sent_bytes, received_bytes: by this attempt.
    """

    members: tuple[str, ...] = ()
    sync_every: int = 0
    is_connected: bool = False
    is_joined: bool = False
    is_behind: bool = False
    decided: int = 0
    closing: tuple[int, float] | None = None
    refusal: UserError | None = None
    lost_at: float | None = None
    why: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0


class _Left(Exception):
    pass


class _RejoinError(Exception):
    pass


class _NotLetInError(Exception):
    def __init__(self, refusal: HubRefusal) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


class Session:
    """What a cluster has sent to the hub and received from it, and the tasks that go on with it.

    Args:
        join: what the cluster joins with.
        join_file: holds the join line; engine hivemind makes its own.
        emit: takes commands for the ranks.
        note: takes lines for the user.
        max_bytes_per_s: limit on what is sent, and on what is fetched, on the wire; 0: none.
        heartbeat_s: between two heartbeats.
        hivemind: the hub is in one of the clusters; None: it was started by itself.
    """

    def __init__(
        self,
        join: Join,
        join_file: Path,
        spool: Spool,
        emit: Callable[[Command], None],
        note: Callable[[str], None],
        *,
        max_bytes_per_s: float,
        heartbeat_s: float,
        hivemind: HivemindSettings | None,
    ) -> None:
        self.state = HubState()
        self.progress: dict[str, Any] = {"step": 0}
        """Fields of the next heartbeat."""
        self._join_body, self._join_file, self._spool = join, join_file, spool
        self._emit, self._note = emit, note
        self._rate = max_bytes_per_s / _ON_THE_WIRE
        self._wanted_heartbeat_s, self._hivemind = heartbeat_s, hivemind
        self._outer_params = list(join.outer_params)
        self._holding = joined(join.holding)  # samples of this cluster that no average has
        self.transfers = Transfers(
            join.name, spool, join.version, emit, self.report, self._is_averaged
        )
        self._wanted: list[int] = []
        self._has_wishes, self._left = asyncio.Event(), asyncio.Event()
        self._reports = asyncio.Queue[tuple[int, str]]()
        self._reset_reason = self._reset_done = ""
        self._node: Any = None  # of the extra hivemind
        self._leaves: bool | None = None
        self._moved_before = (0, 0)
        self._data: HubApi | None = None

    def report(self, text: str, *, warns: bool = False) -> None:
        """Tell the log, or the user, how it stands."""
        self.state.why = text
        if warns:
            self._note(text)
        else:
            log.info("outer %s", text)

    # What rank 0 has done.

    def applied(self, outer_step: int, digest: str) -> None:
        self._outer_params[outer_step % len(self._outer_params)] = digest
        self._spool.note_outer_params(outer_step, digest)
        self.transfers.applied(outer_step)
        self._reports.put_nowait((outer_step, digest))

    def lease(self, num_samples: int) -> None:
        self._wanted.append(num_samples)
        self._has_wishes.set()

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        if self._data is not None and not self.transfers.is_giving:
            self.transfers.give_state(version, paths, outer_params)

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        self._outer_params = list(outer_params)
        self.transfers.forget(version)
        shutil.rmtree(self._spool.pulled, ignore_errors=True)
        if self._data is not None:
            self._group.create_task(self._join())

    def reset_done(self) -> None:
        self._reset_done = self._reset_reason

    def leave(self, reports: bool, has_finished: bool) -> None:
        self._leaves = has_finished if reports else None
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
                case _NotLetInError():
                    self._refuse(error.refusal)
                    return
                case ConfigError():
                    self._refuse(error)
                    return
                case _RejoinError():
                    log.info("to join anew: %s", error)
                case _:
                    log.error("what speaks with the hub has failed", exc_info=error)
                    what = "what speaks with the hub has failed"
                    self.report(f"{what}: {error!r}; it begins anew", warns=True)
            is_healthy = loop.time() - started > _HEALTHY_S
            pause_s = _PAUSE_S if is_healthy else min(2 * pause_s, _LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), pause_s)
                return

    def _refuse(self, error: UserError) -> None:
        what = "the hub does not let this cluster in"
        self.report(f"{what}: {error.what}; {error.fix}", warns=True)
        self.state.refusal = error

    async def _live(self) -> BaseException:
        # Take part for as long as the hub knows this cluster; why no longer.
        try:
            if self._hivemind is not None:
                await self._begin_node(self._hivemind)
            await self._take_part()
        except Exception as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return error
        finally:
            self._count_bytes()
            self._moved_before = (self.state.sent_bytes, self.state.received_bytes)
            self._data = None
        raise AssertionError("a session ends by an exception")

    def _count_bytes(self) -> None:
        sent, received = self._moved_before
        if self._data is not None:
            sent += self._data.channel.sent_bytes
            received += self._data.channel.received_bytes
        self.state.sent_bytes, self.state.received_bytes = sent, received

    async def _begin_node(self, settings: HivemindSettings) -> None:
        if self._node is None:
            from isles.outer.hivemind.host import Node

            folder, name = self._spool.folder / "hivemind", self._join_body.name
            self._node = Node(settings, name, folder, self._spool, self.transfers, self.report)
            self._join_file = await self._node.listen()
        self._node.begin()

    async def _take_part(self) -> None:
        line, member_id = JoinLine.read(self._join_file), self._join_body.id
        data = HubApi(line, member_id, up_bytes_per_s=self._rate, down_bytes_per_s=self._rate)
        self._control = control = HubApi(line, member_id, connections=_CONTROL_CONNECTIONS)
        self._joining, self._leasing = asyncio.Lock(), asyncio.Lock()
        self._heartbeat_s = self._wanted_heartbeat_s
        async with control, data, asyncio.TaskGroup() as group:
            self._group, self._data = group, data
            group.create_task(self._watch(line))
            self.transfers.begin(
                group, control, data, self._check, is_movable=self._node is not None
            )
            group.create_task(self._join_and_go_on())
            await self._left.wait()
            if self._leaves is not None:
                await self._leave_hub(self._leaves)
            raise _Left

    async def _join_and_go_on(self) -> None:
        await self._join()
        for task in (self._send_heartbeats(), self._lease(), self._report_applied()):
            self._group.create_task(task)

    async def _leave_hub(self, has_finished: bool) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reports.join(), _LEAVE_S)
        try:
            await self._control.leave(_LEAVE_S, has_finished=has_finished)
        except CommunicationError as error:
            log.info("%s", error.what)
        if has_finished:
            self._spool.since = self.transfers.version
            self._spool.tidy(self.transfers.version)

    async def _watch(self, line: JoinLine) -> None:
        # Join anew where there is another join line; find out where hivemind's part has failed.
        while True:
            await asyncio.sleep(_LOOK_S)
            with suppress(ConfigError):
                if JoinLine.read(self._join_file) != line:
                    raise _RejoinError("there is a new join line")
            if self._node is not None:
                self._node.check()

    def _check(self, error: HubRefusal) -> None:
        if error.kind == "unknown":
            raise _RejoinError(error.what) from error
        if error.kind not in WHO_IS_THERE:
            raise _NotLetInError(error) from error

    # Joining, and heartbeats.

    async def _join(self) -> None:
        state = self.state
        async with self._leasing, self._joining:
            version = self.transfers.version
            now = {"version": version, "has": self._spool.has(version), "holding": self._holding}
            join = self._join_body.model_copy(update={**now, "outer_params": self._outer_params})
            answer = await self._until_let_in(lambda: self._control.join(join, _JOIN_S))
            dead_after_s = float(answer.settings.get("dead_after_s", 4 * self._heartbeat_s))
            self._heartbeat_s = min(self._wanted_heartbeat_s, dead_after_s / 4)
            is_behind = answer.standing == "behind"
            log.info("outer joined standing=%s step=%d", answer.standing, answer.outer_step)
            state.decided = 0 if is_behind else answer.outer_step
            state.is_behind = is_behind  # before `is_joined`: rank 0 reads both
            state.is_joined = state.is_connected = True
            if self._node is not None:
                self._node.has_joined()
            # What was contributed is counted there, or comes back with a refusal.
            if lost := without(answer.lost, self.transfers.pending_samples):
                self._holding = without(self._holding, lost)
                self._emit(Revoke(tuple(lost)))
            if is_behind:
                self._fall_behind(answer.why)
            else:
                self.transfers.start()

    async def _until_let_in(self, call: Callable[[], Awaitable[R]]) -> R:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            try:
                answer = await call()
            except HubRefusal as error:
                if error.kind == "ahead" and self._node is not None:
                    self._node.knows_more()
                    raise _RejoinError(error.what) from error
                is_early = error.kind in _WILL_PASS and loop.time() - started < _PATIENCE_S
                is_known = self.state.is_joined and error.kind in WHO_IS_THERE
                if not (is_early or is_known):
                    raise _NotLetInError(error) from error
                self._is_lost(error.what)
                await asyncio.sleep(self._heartbeat_s)
            except CommunicationError as error:
                self._is_lost(error.what)
            else:
                self._is_found()
                return answer

    @property
    def _they_are(self) -> str:
        return "the hub is" if self._hivemind is None else "the other clusters are"

    def _is_lost(self, why: str) -> None:
        if self.state.lost_at is None:
            self.state.lost_at, self.state.is_connected = time.monotonic(), False
            why = why if self._node is None else self._node.explain(why)
            meanwhile = "training goes on" if self.state.is_joined else "this cluster waits"
            self.report(f"{self._they_are} away, {meanwhile}: {why}", warns=True)
            self.state.why = why

    def _is_found(self) -> None:
        if self.state.lost_at is not None:
            away = format_duration(time.monotonic() - self.state.lost_at)
            self.state.lost_at, self.state.is_connected = None, True
            self._note(f"{self._they_are} back after {away}")

    async def _send_heartbeats(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            async with self._joining:  # an answer from before joining anew would say "pull" again
                await self._send_heartbeat()
            await asyncio.sleep(_MOMENT_S)
            while not self.progress.get("ends") and loop.time() - started < self._heartbeat_s:
                await asyncio.sleep(_MOMENT_S)
                self._count_bytes()

    async def _send_heartbeat(self) -> None:
        self._count_bytes()
        state, version = self.state, self.transfers.version
        heartbeat = Heartbeat(
            id=self._join_body.id,
            version=version,
            has=self._spool.has(version),
            sent_bytes=state.sent_bytes,
            received_bytes=state.received_bytes,
            **self.progress,
        )
        try:
            answer = await self._control.heartbeat(heartbeat, _HEARTBEAT_S)
            self._heed(answer)
            if answer.command == "reset" and answer.command_reason == self._reset_done:
                await self._control.reset_done(_HEARTBEAT_S)
        except HubRefusal as error:
            if error.kind == "unknown":
                raise _RejoinError(error.what) from error
            self._is_lost(error.what)
        except CommunicationError as error:
            self._is_lost(error.what)
        else:
            self._is_found()

    def _heed(self, answer: HeartbeatAnswer) -> None:
        state, name = self.state, self._join_body.name
        state.sync_every = answer.sync_every
        if tuple(answer.members) != state.members:
            state.members = tuple(answer.members)
            log.info("outer clusters=%s", ",".join(state.members))
        state.closing = None
        for each in answer.open:
            is_missing = name in each.waits_for and each.outer_step not in self.transfers.pending
            if each.due_in_s is not None and is_missing and state.closing is None:
                state.closing = each.outer_step, each.due_in_s
        if answer.command == "pull" and not state.is_behind:
            self._fall_behind(answer.command_reason)
        elif answer.command == "reset" and answer.command_reason not in (
            self._reset_reason,
            self._reset_done,
        ):
            self._reset_reason = answer.command_reason
            self._note(f"this cluster goes back to the last average: {answer.command_reason}")
            self._emit(Reset())
        if answer.ended is not None:
            self._emit(End(answer.ended))
        now = asyncio.get_running_loop().time()
        is_asked = self.transfers.is_giving or now - self.transfers.asked_at < _ASK_S
        if answer.send_state and not is_asked:
            self.transfers.asked_at = now
            self._emit(SendState())

    # Samples, and what was applied.

    async def _lease(self) -> None:
        while True:
            while not self._wanted:
                self._has_wishes.clear()
                await self._has_wishes.wait()
            async with self._leasing:
                try:
                    found = await self._control.lease(self._wanted[0], _FOREVER_S)
                except HubRefusal as error:
                    raise _RejoinError(error.what) from error
                self._wanted.pop(0)
                self._holding = joined([*self._holding, *found])
            self._emit(Lease(tuple(found)))

    def _is_averaged(self, samples: Sequence[Interval]) -> None:
        self._holding = without(self._holding, samples)

    async def _report_applied(self) -> None:
        while True:
            outer_step, digest = await self._reports.get()
            try:
                await until_answered(
                    lambda: self._control.applied(outer_step, digest, _ASK_S)  # noqa: B023
                )
            except HubRefusal as error:
                if error.kind == "unknown":
                    raise _RejoinError(error.what) from error
                log.warning("%s", error.what)
            finally:
                self._reports.task_done()

    def _fall_behind(self, why: str) -> None:
        self.state.is_behind, self.state.decided = True, 0
        self.transfers.stop()
        self._note(f"this cluster takes the weights of another: {why}")
        self.transfers.pull_state()

"""A cluster's membership, from joining the hub until something ends it; then the client rejoins.

An exception of one of its tasks ends a session: the hub has forgotten this cluster, its outer
parameters differ from the run's, or the hub refuses for good. The state of the client outlives the
session (`ClientState`): a new session sends undecided contributions again. `http.py` retries
requests, without a limit unless stated otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from isles.errors import CommunicationError, UserError
from isles.facts.units import format_duration, printable
from isles.outer.bucket.api import BucketApi
from isles.outer.client.api import HubApi
from isles.outer.client.http import DeadlineError, HubRefusal, RateLimit
from isles.outer.client.spool import Spool
from isles.outer.messages import (
    Adopt,
    Apply,
    Command,
    End,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Lease,
    Pending,
    Reset,
    Revoke,
    RoundAnswer,
    SendState,
    StateAnswer,
    digest_of,
    hash_chunks,
)
from isles.outer.samples import joined, without
from isles.outer.state_file import momentum_of, state_digest

log = logging.getLogger(__name__)

_FOREVER_S = 1e9
_JOIN_S, _HEARTBEAT_S, _MOMENT_S = 5.0, 5.0, 0.25
_ASK_S, _LEAVE_S, _CANCEL_S, _AGAIN_S = 60.0, 5.0, 20.0, 1.0
_SHOW_EVERY_S = 5.0
_LOOK_AGAIN_S = 5.0
_WAIT_S = 60.0
"""Seconds until the user is told which cluster holds up an average or a state."""
_LONGEST = 2000
"""Limit of a note, in characters."""
_MOST_REFUSED = 64
"""Maximum number of refused clusters recorded per round."""
_AHEAD = 4
"""Maximum number of averages stored here that have not been applied."""
_ON_THE_WIRE = 1.05
"""Bytes on the wire per byte of a file: TLS, HTTP and TCP add theirs."""

JOIN_AGAIN = {"unknown", "gone"}
"""Refusals of a hub that has forgotten this cluster, or lacks one of its averages."""
_LEFT_OUT = {"late", "refused", "behind"}
"""Refusals of one contribution, which stays out of the average."""


@dataclass(slots=True)
class HubState:
    """Known state of the hub. The client's thread writes it, rank 0 reads it.

    Args:
        members: the clusters that take part now, this one included.
        sync_every: inner steps per round that the slowest link of all needs; 0: unknown.
        is_joined: whether the hub has accepted this cluster.
        is_behind: whether the outer parameters here differ from the run's; `Adopt` will come.
        decided: outer steps that were decided before this cluster joined, without its part.
        closing: an outer step that will be closed without this cluster, and the seconds left.
        refusal: the hub refuses this cluster for good.
        lost_at: start of the time without answers of the hub, by `time.monotonic`; None: it
            answers.
        why: the last report.
        shown: engine bucket: what all clusters show to people, in the form of a hub.
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
    shown: dict[str, Any] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0

    def is_away_for(self, seconds: float) -> bool:
        """True if the hub has not answered for this long, or refuses this cluster."""
        since = self.lost_at
        is_long = since is not None and time.monotonic() - since >= seconds
        return is_long or self.refusal is not None


class RejoinError(Exception):
    """Ends a session; the next may begin immediately."""


class ClientState:
    """State of the client over all sessions: contributions, averages, and its view of the hub."""

    def __init__(
        self,
        join: Join,
        spool: Spool,
        emit: Callable[[Command], None],
        note: Callable[[str], None],
        max_bytes_per_s: float,
        shows: Callable[[], str] = lambda: "",
    ) -> None:
        self.shows = shows
        self.first_join, self.spool, self.emit, self._note = join, spool, emit, note
        self.state = HubState()
        self.progress: dict[str, Any] = {"step": 0}
        """Fields of the next heartbeat."""
        self.up = RateLimit(max_bytes_per_s / _ON_THE_WIRE)
        self.down = RateLimit(max_bytes_per_s / _ON_THE_WIRE)
        self.outer_params = list(join.outer_params)
        self.holding = joined(join.holding)
        """Samples of this cluster that are in no average."""
        self.pending: dict[int, Pending] = {}
        self.delivered = join.version
        """Averages given to rank 0."""
        self.wanted: list[int] = []
        self.reset_reason = self.reset_done = ""
        self.node: Any = None
        """Engine hivemind: the node that leads to a hub in one of the clusters."""
        self.they_are = "the hub is"

    def note(self, text: str) -> None:
        """Tell the user, shortened, because the hub may have chosen the text."""
        self._note(printable(text, longest=_LONGEST))

    def report(self, text: str, *, warns: bool = False) -> None:
        """Report the state to the log, or to the user."""
        text = self.state.why = printable(text, longest=_LONGEST)
        if warns:
            self.note(text)
        else:
            log.info("outer %s", text)

    def is_lost(self, why: str) -> None:
        if self.state.lost_at is None:
            self.state.lost_at, self.state.is_connected = time.monotonic(), False
            why = why if self.node is None else self.node.explain(why)
            meanwhile = "training continues" if self.state.is_joined else "this cluster waits"
            self.report(f"{self.they_are} unreachable, {meanwhile}: {why}", warns=True)
            self.state.why = why

    def is_found(self) -> None:
        if self.state.lost_at is not None:
            away = format_duration(time.monotonic() - self.state.lost_at)
            self.state.lost_at, self.state.is_connected = None, True
            self.note(f"{self.they_are} back after {away}")


class Session:
    """One session; its tasks run in `group`."""

    def __init__(
        self,
        client: ClientState,
        api: HubApi | BucketApi,
        group: asyncio.TaskGroup,
        heartbeat_s: float,
    ) -> None:
        self._client, self._api, self._group = client, api, group
        self._state, self._spool = client.state, client.spool
        self._name, self._heartbeat_s = client.first_join.name, heartbeat_s
        self._sending, self._leasing, self._reporting = (asyncio.Lock() for _ in range(3))
        self._uploads: dict[int, asyncio.Task[tuple[int, float]]] = {}
        self._room = asyncio.Event()
        self._asked_at = -math.inf

    async def join(self) -> None:
        """Join the hub, and start all tasks of a member."""
        client, state, spool = self._client, self._state, self._spool
        now = {"version": spool.version, "has": spool.has, "holding": client.holding}
        join = client.first_join.model_copy(update={**now, "outer_params": client.outer_params})
        answer = await self._api.join(join, _JOIN_S)
        client.is_found()
        is_behind = answer.standing == "behind"
        log.info("outer joined standing=%s step=%d", answer.standing, answer.outer_step)
        state.decided = 0 if is_behind else answer.outer_step
        state.is_behind = is_behind  # before `is_joined`: rank 0 reads both
        state.is_joined = state.is_connected = True
        if client.node is not None:
            client.node.has_joined()
        # Contributions are counted there, or come back with a refusal.
        sent = [span for pending in client.pending.values() for span in pending.samples]
        if lost := without(answer.lost, sent):
            client.holding = without(client.holding, lost)
            client.emit(Revoke(tuple(lost)))
        self._heartbeat_s = min(self._heartbeat_s, answer.settings.dead_after_s / 4)
        self._group.create_task(self._send_heartbeats())
        self._group.create_task(self._show())
        for num_samples in client.wanted:
            self.lease(num_samples)
        if is_behind:
            client.note(f"this cluster copies the weights of another cluster ({answer.why})")
            self._group.create_task(self._pull_state())
        else:
            spool.tidy()
            self._group.create_task(self._follow())
            for outer_step in sorted(client.pending):
                self.contribute(client.pending[outer_step])

    async def leave(self, *, has_finished: bool) -> None:
        """Leave the hub, within some seconds."""
        try:
            async with asyncio.timeout(_LEAVE_S), self._reporting:
                pass  # all applied averages are reported
        except TimeoutError:
            log.info("the applied averages could not be reported")
        try:
            await self._api.leave(_LEAVE_S, has_finished=has_finished)
        except CommunicationError as error:
            log.info("%s", error.what)
        if has_finished:
            self._spool.since = self._spool.version
            self._spool.tidy()

    # Heartbeats.

    async def _send_heartbeats(self) -> None:
        client, state = self._client, self._state
        while True:
            state.sent_bytes, state.received_bytes = client.up.total, client.down.total
            heartbeat = Heartbeat(
                id=self._api.id,
                version=self._spool.version,
                has=self._spool.has,
                sent_bytes=state.sent_bytes,
                received_bytes=state.received_bytes,
                **client.progress,
            )
            try:
                answer = await self._api.heartbeat(heartbeat, _HEARTBEAT_S)
                self._heed(answer)
                if answer.command == "reset" and answer.command_reason == client.reset_done:
                    await self._api.reset_done(_HEARTBEAT_S)
            except DeadlineError as error:
                client.is_lost(error.what)
            else:
                client.is_found()
            end = time.monotonic() + self._heartbeat_s
            await asyncio.sleep(_MOMENT_S)
            while not client.progress.get("ends") and time.monotonic() < end:
                await asyncio.sleep(_MOMENT_S)

    async def _show(self) -> None:
        # Status for people who cannot reach this cluster's machines. No run depends on it.
        while True:
            with suppress(DeadlineError, OSError):
                if record := await asyncio.to_thread(self._client.shows):
                    try:
                        await self._api.show(record, _SHOW_EVERY_S)
                    except HubRefusal as error:  # from a hub of an earlier version
                        log.info("outer the hub does not show this cluster: %s", error.what)
                        return
            await asyncio.sleep(_SHOW_EVERY_S)

    def _heed(self, answer: HeartbeatAnswer) -> None:
        client, state = self._client, self._state
        state.sync_every = answer.sync_every
        if tuple(answer.members) != state.members:
            state.members = tuple(answer.members)
            log.info("outer clusters=%s", printable(",".join(state.members), longest=_LONGEST))
        state.closing = None
        for each in answer.open:
            is_missing = self._name in each.waits_for and each.outer_step not in client.pending
            if each.due_in_s is not None and is_missing and state.closing is None:
                state.closing = each.outer_step, each.due_in_s
        known = (client.reset_reason, client.reset_done)
        if answer.command == "pull" and not state.is_behind:
            raise RejoinError(answer.command_reason)
        if answer.command == "reset" and answer.command_reason not in known:
            client.reset_reason = answer.command_reason
            client.note(f"this cluster goes back to the last average: {answer.command_reason}")
            client.emit(Reset())
        if answer.ended is not None:
            client.emit(End(answer.ended))
        if answer.send_state and time.monotonic() - self._asked_at > _ASK_S:
            self._asked_at = time.monotonic()
            client.emit(SendState())

    # Contributions and averages.

    def contribute(self, pending: Pending) -> None:
        """Upload a contribution from the spool."""
        if not self._state.is_behind:
            task = self._group.create_task(self._send(pending))
            self._uploads[pending.outer_step] = task

    async def _send(self, pending: Pending) -> tuple[int, float]:
        # Returns the number of sent bytes, and the seconds that this took.
        up, path = self._client.up, self._spool.contribution(pending.outer_step)
        while True:
            try:
                # One after the other: the outer step that is committed first gets the full
                # bandwidth.
                async with self._sending:
                    started, before = time.monotonic(), up.total
                    await self._api.contribute(
                        pending.outer_step,
                        path,
                        tokens=pending.tokens,
                        steps=pending.inner_steps,
                        samples=pending.samples,
                        deadline_s=_FOREVER_S,
                    )
                    return up.total - before, time.monotonic() - started
            except HubRefusal as error:
                if error.kind in _LEFT_OUT:
                    self._client.report(error.what, warns=error.kind != "late")
                    return 0, 0.0
                if error.kind != "early":
                    raise
                await asyncio.sleep(_AGAIN_S)

    def applied(self, outer_step: int, digest: str) -> None:
        """Report an applied average, and fetch the next."""
        for late in [other for other in self._uploads if other <= outer_step]:
            self._uploads.pop(late).cancel()
        self._room.set()
        self._group.create_task(self._report_applied(outer_step, digest))

    async def _report_applied(self, outer_step: int, digest: str) -> None:
        async with self._reporting:
            try:
                await self._api.applied(outer_step, digest, _FOREVER_S)
            except HubRefusal as error:
                if error.kind in JOIN_AGAIN:
                    raise
                log.warning("%s", error.what)

    async def _follow(self) -> None:
        # One average after the other, as far as rank 0 keeps up.
        client, spool, down = self._client, self._spool, self._client.down
        while True:
            outer_step = client.delivered
            while outer_step >= spool.version + _AHEAD:
                self._room.clear()
                await self._room.wait()
            answer = await self._committed(outer_step)
            sent_bytes, send_s = await self._end_upload(answer)
            before, started = down.total, time.monotonic()
            path = spool.average(outer_step)
            await self._fetch(answer, path)
            receive_s = time.monotonic() - started
            if client.node is not None:
                # With the hub in one of the clusters, its memory may be lost. So no average is
                # applied before all living clusters have it.
                spool.note_answer(answer)
                while not await self._api.held(outer_step, _WAIT_S):
                    pass
            client.delivered = outer_step + 1
            pending = client.pending.pop(outer_step, None)
            if pending is not None and self._name in answer.weights:
                client.holding = without(client.holding, pending.samples)
            client.emit(
                Apply(
                    outer_step=outer_step,
                    path=path if answer.size_bytes else None,
                    weights=answer.weights,
                    refused=dict(islice(answer.refused.items(), _MOST_REFUSED)),
                    size_bytes=answer.size_bytes,
                    sent_bytes=sent_bytes,
                    received_bytes=down.total - before,
                    send_s=send_s,
                    receive_s=receive_s,
                )
            )
            if pending is not None:
                spool.contribution(outer_step).unlink(missing_ok=True)

    async def _committed(self, outer_step: int) -> RoundAnswer:
        while True:
            try:
                return await self._api.wait_round(outer_step, _WAIT_S)
            except DeadlineError as error:
                is_waited_for = outer_step in self._client.pending and self._state.is_connected
                self._client.report(error.what, warns=is_waited_for)

    async def _end_upload(self, answer: RoundAnswer) -> tuple[int, float]:
        task = self._uploads.pop(answer.outer_step, None)
        if task is None:
            return 0, 0.0
        if self._name in answer.weights:
            await asyncio.wait({task}, timeout=_CANCEL_S)  # it will notice soon
        task.cancel()
        await asyncio.wait({task})
        return (0, 0.0) if task.cancelled() else task.result()

    async def _fetch(self, answer: RoundAnswer, path: Path) -> None:
        if not answer.size_bytes:
            path.touch()  # nothing is missing: see `Spool.has`
            return
        if path.exists():
            if digest_of(await asyncio.to_thread(hash_chunks, path)) == answer.digest:
                return
            path.unlink()
        await self._api.fetch_average(answer, path, _FOREVER_S)

    # Samples and states.

    def lease(self, num_samples: int) -> None:
        """Request samples."""
        self._group.create_task(self._lease(num_samples))

    async def _lease(self, num_samples: int) -> None:
        client = self._client
        async with self._leasing:
            try:
                found = await self._api.lease(num_samples, _FOREVER_S)
            except HubRefusal as error:
                raise RejoinError(error.what) from error
            client.wanted.remove(num_samples)
            client.holding = joined([*client.holding, *found])
            client.emit(Lease(tuple(found)))

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        """Upload this cluster's state for another cluster."""
        self._asked_at = math.inf
        self._group.create_task(self._give_state(version, paths, outer_params))

    async def _give_state(
        self, version: int, paths: Sequence[Path], outer_params: Sequence[str]
    ) -> None:
        try:
            await self._api.give_state(version, outer_params, paths, _FOREVER_S)
        except HubRefusal as error:
            if error.kind in JOIN_AGAIN:
                raise
            log.info("outer the state given to another cluster was refused: %s", error.what)
        self._asked_at = -math.inf

    async def _pull_state(self) -> None:
        client, folder = self._client, self._spool.pulled
        while True:
            try:
                answer = await self._api.pull_state(folder, _WAIT_S)
            except DeadlineError as error:
                client.report(error.what, warns=True)
                continue
            if await asyncio.to_thread(self._is_usable, answer):
                break
            # An honest hub has checked it before, but its disk may have damaged it since.
            client.report(
                f"the state of {answer.source} after {answer.version} outer steps is unusable; "
                "this cluster waits for another state",
                warns=True,
            )
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            await asyncio.sleep(_LOOK_AGAIN_S)
        client.emit(
            Adopt(
                version=answer.version,
                paths=tuple(folder / file.name for file in answer.files),
                outer_params=tuple(answer.outer_params),
                source=answer.source,
            )
        )

    def _is_usable(self, answer: StateAnswer) -> bool:
        # Whether the pulled files match the announcement; otherwise the ranks would fail.
        join = self._client.first_join
        layout, momentum = join.identity.get("layout", ""), momentum_of(join.identity)
        if not len(answer.files) == len(answer.outer_params) == len(join.pieces):
            return False
        return all(
            state_digest(
                self._spool.pulled / file.name, layout, index, answer.version, pieces, momentum
            )
            == digest
            for index, (file, digest, pieces) in enumerate(
                zip(answer.files, answer.outer_params, join.pieces, strict=True)
            )
        )

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
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from isles.errors import CommunicationError
from isles.facts.units import printable
from isles.outer.client.http import DeadlineError, HubRefusal
from isles.outer.client.meeting import LONGEST, ClientState, ClusterApi, Meeting, RejoinError
from isles.outer.messages import (
    Adopt,
    Apply,
    End,
    Heartbeat,
    HeartbeatAnswer,
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
_MOST_REFUSED = 64
"""Maximum number of refused clusters recorded per round."""
_AHEAD = 4
"""Maximum number of averages stored here that have not been applied."""

JOIN_AGAIN = {"unknown", "gone"}
"""Refusals of a hub that has forgotten this cluster, or lacks one of its averages."""
_LEFT_OUT = {"late", "refused", "behind"}
"""Refusals of one contribution, which stays out of the average."""


class Session:
    """One session; its tasks run in `group`."""

    def __init__(
        self,
        client: ClientState,
        meeting: Meeting,
        api: ClusterApi,
        group: asyncio.TaskGroup,
        heartbeat_s: float,
    ) -> None:
        self._client, self._api, self._group = client, api, group
        self._meeting = meeting
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
        self._meeting.has_joined()
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
                client.is_lost(self._meeting.explain(error.what))
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
            log.info("outer clusters=%s", printable(",".join(state.members), longest=LONGEST))
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
            if self._meeting.may_forget:
                # No average is applied before all living clusters have it.
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

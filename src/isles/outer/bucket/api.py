"""Requests of a cluster to a bucket; the same as the requests to a hub in `client/api.py`.

Each request is one change of the memory in the bucket, or none; files are stored next to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from isles.errors import ConfigError
from isles.facts.buckets import FIXES
from isles.outer.bucket import BucketSettings
from isles.outer.bucket.link import (
    BucketLink,
    BucketRefusal,
    Missing,
    as_refusal,
    copy,
    is_whole,
    refusal,
)
from isles.outer.bucket.replica import (
    Replica,
    average_place,
    part_place,
    refused,
    state_place,
)
from isles.outer.client.http import DeadlineError, RateLimit
from isles.outer.client.meeting import ClientState, ClusterApi, Meeting
from isles.outer.client.sizes import average_fault, state_fault
from isles.outer.client.spool import Spool
from isles.outer.hub.files import average_norm, norm_of
from isles.outer.hub.rules import Refusal
from isles.outer.messages import (
    Applied,
    Contribution,
    Heartbeat,
    HeartbeatAnswer,
    Interval,
    Join,
    JoinAnswer,
    LeaseRequest,
    LeaveRun,
    RoundAnswer,
    StateAnswer,
    StateFile,
    StateOffer,
    digest_of,
    hash_chunks,
)
from isles.outer.state_file import momentum_of, state_digest
from isles.run.objects import StoreError, open_store, probe

log = logging.getLogger(__name__)

T = TypeVar("T")

_JOIN_S, _HEARTBEAT_S = 60.0, 30.0
"""Minimum deadline in seconds: a request to a bucket may take seconds."""
_AGAIN_S = 1.0
_CODED = 1.1
"""Largest ratio of an average's norm to its contributions' norms: the average is encoded again."""


class BucketApi(ClusterApi):
    """The requests of one cluster; for one event loop. Methods as in `ClusterApi`.

    Args:
        name: name of this cluster.
        spool: folder of its files.
        report: called with reasons of retries.
        show: called with what all clusters show to people.
    """

    def __init__(
        self,
        settings: BucketSettings,
        member_id: str,
        name: str,
        spool: Spool,
        *,
        up: RateLimit,
        down: RateLimit,
        report: Callable[[str], None],
        show: Callable[[dict[str, Any]], None],
    ) -> None:
        self.id, self._name, self._settings, self._spool = member_id, name, settings, spool
        self._up, self._down, self._report, self._show = up, down, report, show
        self._link: BucketLink | None = None
        self._there: Replica | None = None
        self._looking: asyncio.Task[None] | None = None
        self._leases = 0
        self._asks = ""

    async def __aenter__(self) -> BucketApi:
        return self

    async def __aexit__(self, *error: object) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    def close(self) -> None:
        """Close for good."""
        if self._link is not None:
            self._link.close()
        if self._there is not None:
            self._there.close()

    def check(self) -> None:
        """Raise the error that has ended the background task, if any."""
        if self._looking is not None and self._looking.done():
            self._looking.result()

    @property
    def _replica(self) -> Replica:
        assert self._there is not None, "not joined"
        return self._there

    @property
    def _join(self) -> Join:
        assert self._replica.joined is not None, "not joined"
        return self._replica.joined

    @property
    def _way(self) -> BucketLink:
        assert self._link is not None, "not joined"
        return self._link

    async def _change(self, what: str, call: Callable[[], T], deadline_s: float) -> T:
        try:
            return await self._replica.change(what, call, deadline_s)
        except Refusal as error:
            raise refused(error, self._settings.url) from error
        except ConfigError as error:
            raise as_refusal(error) from error

    async def _read(self, call: Callable[[], T]) -> T:
        try:
            return await self._replica.ask(call)
        except Refusal as error:
            raise refused(error, self._settings.url) from error
        except ConfigError as error:
            raise as_refusal(error) from error

    # Membership.

    async def join(self, join: Join, deadline_s: float) -> JoinAnswer:
        deadline_s = max(deadline_s, _JOIN_S)
        await self._open(deadline_s)
        replica, core = self._replica, self._replica.core
        replica.joined = None  # the core compares the run with the new request
        answer = await self._change("joining", lambda: core.join(join), deadline_s)
        self._leases = 0
        self._asks, replica.joined = "", join
        replica.number = await self._read(lambda: int(core.membership.find(self.id)["number"]))
        self._looking = asyncio.create_task(replica.look())
        return answer

    async def _open(self, deadline_s: float) -> None:
        if self._link is None:
            try:
                store = await asyncio.to_thread(
                    open_store, self._settings.url, f"outer.url {self._settings.url}"
                )
            except StoreError as error:
                raise refusal(error, self._settings.url) from error
            self._link = BucketLink(store, self._up, self._down, self._report)
        if self._there is None:
            await self._link.call("a first write", deadline_s, probe, self._link.store)
            self._there = Replica(
                self._link,
                self._settings.rules,
                self._spool.folder / "bucket",
                self._name,
                self._spool.contribution,
                self._show,
            )
        try:
            await self._there.open(deadline_s)
        except ConfigError as error:
            raise as_refusal(error) from error

    async def heartbeat(self, heartbeat: Heartbeat, deadline_s: float) -> HeartbeatAnswer:
        deadline_s, core = max(deadline_s, _HEARTBEAT_S), self._replica.core
        said = {"heartbeat": heartbeat.model_dump(), "asks": self._asks, "is": secrets.token_hex(4)}
        body, name = json.dumps(said).encode(), f"members/{self._name}"
        await self._way.call("a heartbeat", deadline_s, self._way.store.write, name, body)
        return await self._change("a heartbeat", lambda: core.heartbeat(heartbeat), deadline_s)

    async def show(self, record: str, deadline_s: float) -> None:
        """Does nothing: heartbeats tell the others enough, and people read nothing more from a
        bucket."""

    async def leave(self, deadline_s: float, *, has_finished: bool = False) -> None:
        body, core = LeaveRun(id=self.id, has_finished=has_finished), self._replica.core

        def leave() -> None:
            try:
                core.leave(body)
            except (
                Refusal
            ) as error:  # it has left: the change was written before its answer was lost
                if error.kind != "unknown":
                    raise

        await self._change("leaving", leave, deadline_s)
        name = f"members/{self._name}"
        await self._way.call("leaving", deadline_s, self._way.store.delete, [name])

    async def reset_done(self, deadline_s: float) -> None:
        core = self._replica.core
        await self._change("a reset", lambda: core.reset_done(self.id), deadline_s)

    async def lease(self, samples: int, deadline_s: float) -> Sequence[Interval]:
        self._leases += 1
        body = LeaseRequest(id=self.id, number=self._leases, samples=samples)
        core = self._replica.core
        answer = await self._change("a lease of samples", lambda: core.lease(body), deadline_s)
        return answer.samples

    # Contributions and averages.

    async def contribute(
        self,
        outer_step: int,
        path: Path,
        *,
        tokens: int,
        steps: int,
        samples: Sequence[Interval],
        deadline_s: float,
    ) -> None:
        replica, core, what = self._replica, self._replica.core, f"contributing to {outer_step}"
        digest = digest_of(await asyncio.to_thread(hash_chunks, path))
        contribution = Contribution(
            id=self.id, tokens=tokens, steps=steps, samples=list(samples), digest=digest
        )
        join, norm, failure = self._join, 0.0, ""
        try:
            pieces = join.pieces[outer_step % len(join.pieces)]
            norm = await asyncio.to_thread(norm_of, join.codec, pieces, path)
        except ValueError as error:
            failure = str(error)
        number, size_bytes = replica.number, path.stat().st_size

        def may() -> bool:
            if core.is_counted(self.id, outer_step):
                return False
            core.rounds.check(core.caller(self.id), outer_step)
            return True

        if not await self._change(what, may, deadline_s):
            return
        if not failure:
            await self._way.put(part_place(outer_step, number, digest), path)

        def count() -> None:
            core.complete(outer_step, contribution, norm, failure)
            new = "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)"
            core.journal.run(new, outer_step, number, digest, size_bytes)
            replica.close_round()

        await self._change(what, count, deadline_s)

    async def wait_round(self, outer_step: int, deadline_s: float) -> RoundAnswer:
        replica, loop = self._replica, asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            changed = replica.changed  # before looking, so that no change is missed
            answer = await self._read(lambda: replica.core.rounds.answer(outer_step))
            if answer.state == "committed":
                return answer
            if (left_s := end - loop.time()) <= 0:
                waits_for = await self._read(partial(self._waits_for, answer))
                raise DeadlineError(
                    f"outer step {outer_step} is {answer.state} after {deadline_s:.0f} s; "
                    f"it waits for {waits_for}",
                    where=self._settings.url,
                    fix="check the clusters named above; `wait: time_boxed` does not wait for slow "
                    "clusters",
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()

    def _waits_for(self, answer: RoundAnswer) -> str:
        core = self._replica.core
        if answer.waits_for:
            return ", ".join(answer.waits_for)
        if answer.state == "averaging":
            averager = int((core.journal.get("averager") or "0 0").split(" ")[1])
            names = [row["name"] for row in core.membership.living() if row["number"] == averager]
            return f"the average, computed by {' '.join(names) or 'the next cluster'}"
        least = core.settings.min_clusters
        return f"other clusters ({len(answer.contributed)} of {least}, outer.min_clusters)"

    def _odd(self, what: str) -> BucketRefusal:
        return BucketRefusal("malformed", what, where=self._settings.url, fix=FIXES["odd"])

    async def fetch_average(self, answer: RoundAnswer, target: Path, deadline_s: float) -> None:
        if fault := average_fault(self._join, answer):
            raise self._odd(fault)
        step, digest = answer.outer_step, answer.digest
        core, place = self._replica.core, average_place(step, digest)
        made_here = core.rounds.average_path(step)
        fetched = target.with_name(f"{target.name}.foreign")
        if await asyncio.to_thread(is_whole, made_here, digest):
            await asyncio.to_thread(copy, made_here, target)
            return
        while True:
            try:
                await self._way.get(place, answer.size_bytes, digest, fetched)
                await self._inspect(answer, fetched)
                fetched.replace(target)
                return
            except Missing as error:
                self._report(f"cannot fetch the average of outer step {step}: {error}")
            await asyncio.sleep(_AGAIN_S)
            # Raises if it is not kept any more: this cluster then copies the state of another.
            await self._read(lambda: core.average_path(step))

    async def _inspect(self, answer: RoundAnswer, path: Path) -> None:
        # Another cluster has made this average, so verify it: it must be finite, and not larger
        # than the largest of its contributions.
        join, step, core = self._join, answer.outer_step, self._replica.core
        pieces = join.pieces[step % len(join.pieces)]
        sql = "SELECT MAX(norm) AS most FROM parts WHERE round = ? AND reason = ''"
        row = await self._read(lambda: core.journal.row(sql, step))
        most = _CODED * (row["most"] or 0.0 if row is not None else 0.0)
        what = f"the average of outer step {step}"
        try:
            num_parts = len(answer.weights)
            norm = await asyncio.to_thread(average_norm, join.codec, pieces, num_parts, path)
        except ValueError as error:
            path.unlink()
            raise self._odd(f"{what} must not be applied: {error}") from error
        if not norm <= most:
            path.unlink()
            largest = f"the largest of its contributions has {most / _CODED:.4g}"
            raise self._odd(f"{what} has a norm of {norm:.4g}, but {largest}")

    async def held(self, outer_step: int, deadline_s: float) -> bool:
        """Always True: data in a bucket is not lost with a cluster."""
        return True

    async def applied(self, outer_step: int, outer_params: str, deadline_s: float) -> None:
        body = Applied(id=self.id, outer_step=outer_step, outer_params=outer_params)
        core = self._replica.core
        await self._change("a report", lambda: core.applied(body), deadline_s)

    # States.

    async def give_state(
        self, version: int, outer_params: Sequence[str], files: Sequence[Path], deadline_s: float
    ) -> None:
        digests = [digest_of(await asyncio.to_thread(hash_chunks, path)) for path in files]
        offered = [
            StateFile(name=path.name, size_bytes=path.stat().st_size, digest=digest)
            for path, digest in zip(files, digests, strict=True)
        ]
        offer = StateOffer(
            id=self.id, version=version, outer_params=list(outer_params), files=offered
        )
        core, what = self._replica.core, "giving the state"

        def begin() -> int:
            return core.states.offer(core.caller(self.id), offer)

        state = await self._change(what, begin, deadline_s)
        for index, (path, digest) in enumerate(zip(files, digests, strict=True)):
            await self._way.put(state_place(state, index, digest), path)
        await self._change(what, lambda: core.states.complete(state), deadline_s)

    async def pull_state(self, folder: Path, deadline_s: float) -> StateAnswer:
        core, loop = self._replica.core, asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            answer = await self._change(
                "asking for the state",
                lambda: core.states.want(core.caller(self.id)),
                max(1.0, end - loop.time()),
            )
            self._asks = answer.source if answer.state is None else ""
            if answer.state is not None and await self._fetch_state(answer, folder):
                return answer
            if loop.time() >= end:
                source = answer.source or "no cluster (no other living cluster is up to date)"
                raise DeadlineError(
                    f"no state has arrived within {deadline_s:.0f} s; it was requested from "
                    f"{source}",
                    where=self._settings.url,
                    fix="check the log of that cluster",
                )
            await asyncio.sleep(_AGAIN_S)

    async def _refuse_state(self, answer: StateAnswer, why: str) -> None:
        core, state = self._replica.core, answer.state
        assert state is not None
        self._report(why)
        with suppress(BucketRefusal):  # another cluster has refused it already
            await self._change("a wrong state", lambda: core.states.refuse(state), _HEARTBEAT_S)

    async def _fetch_state(self, answer: StateAnswer, folder: Path) -> bool:
        if fault := state_fault(self._join, answer):
            await self._refuse_state(answer, fault)
            return False
        folder.mkdir(exist_ok=True)
        for index, file in enumerate(answer.files):
            assert answer.state is not None
            place, target = state_place(answer.state, index, file.digest), folder / file.name
            if await asyncio.to_thread(is_whole, target, file.digest):
                continue
            try:
                await self._way.get(place, file.size_bytes, file.digest, target)
            except Missing as error:  # deleted in the meantime: there will be a newer state
                self._report(f"cannot fetch the state of {answer.source}: {error}")
                return False
        join = self._join
        layout, pieces = join.identity.get("layout", ""), join.pieces
        found = [
            await asyncio.to_thread(
                state_digest,
                folder / file.name,
                layout,
                index,
                answer.version,
                pieces[index],
                momentum_of(join.identity),
            )
            for index, file in enumerate(answer.files)
        ]
        if found != answer.outer_params:
            why = f"the state of {answer.source} differs from its announcement"
            await self._refuse_state(answer, why)
            return False
        return True


class BucketMeeting(Meeting):
    """A bucket, without a hub."""

    refuser, they_are = "bucket", "the bucket is"

    def __init__(self, settings: BucketSettings) -> None:
        self._settings = settings
        self._api: BucketApi | None = None

    async def open(self, client: ClientState) -> BucketApi:
        if self._api is None:

            def show(shown: dict[str, Any]) -> None:
                client.state.shown = shown

            self._api = BucketApi(
                self._settings,
                client.first_join.id,
                client.first_join.name,
                client.spool,
                up=client.up,
                down=client.down,
                report=client.report,
                show=show,
            )
        return self._api

    def check(self) -> None:
        if self._api is not None:
            self._api.check()

    async def close(self, *, waits: bool) -> None:
        if self._api is not None:
            self._api.close()

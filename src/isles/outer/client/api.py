"""Requests of a cluster to its hub, by name.

Every call ends by its deadline. Both sides can resume an interrupted file transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from isles.errors import ConfigError
from isles.outer.client.http import DeadlineError, HubConnection, HubRefusal, RateLimit
from isles.outer.client.meeting import ClientState, ClusterApi, Meeting, RejoinError
from isles.outer.client.sizes import average_fault, state_fault
from isles.outer.messages import (
    Answer,
    Applied,
    Contribution,
    ContributionAnswer,
    Heartbeat,
    HeartbeatAnswer,
    HeldAnswer,
    Interval,
    Join,
    JoinAnswer,
    LeaseAnswer,
    LeaseRequest,
    LeaveRun,
    OnlyId,
    RoundAnswer,
    ShownRecord,
    StateAnswer,
    StateFile,
    StateNumber,
    StateOffer,
    digest_of,
    hash_chunks,
)
from isles.run.join_line import JoinLine

_POLL_S = 20.0
_AGAIN_S = 1.0
_SEAL_S = 300.0


class HubApi(ClusterApi):
    """The requests of one cluster; for one event loop.

    Each method has a deadline in seconds. It raises `HubRefusal` if the hub refuses, and
    `DeadlineError` after the deadline.

    Args:
        member_id: 32 hexadecimal digits that this cluster keeps for the whole run.
        up, down: limits on uploads and downloads; None: no limit.
    """

    def __init__(
        self,
        line: JoinLine,
        member_id: str,
        *,
        up: RateLimit | None = None,
        down: RateLimit | None = None,
    ) -> None:
        self.id = member_id
        self.channel = HubConnection(line, member_id, up or RateLimit(0.0), down or RateLimit(0.0))
        self._leases = 0
        self._joined: Join | None = None

    async def __aenter__(self) -> HubApi:
        await self.channel.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()

    # Membership.

    async def join(self, join: Join, deadline_s: float) -> JoinAnswer:
        """Join the run; also after a restart of this cluster, or after the hub forgot it."""
        answer = await self.channel.ask("/v1/join", JoinAnswer, deadline_s, join)
        self._leases, self._joined = 0, join
        return answer

    async def heartbeat(self, heartbeat: Heartbeat, deadline_s: float) -> HeartbeatAnswer:
        return await self.channel.ask("/v1/heartbeat", HeartbeatAnswer, deadline_s, heartbeat)

    async def show(self, record: str, deadline_s: float) -> None:
        """Publish what this cluster shows to people; the hub keeps the newest record."""
        body = ShownRecord(id=self.id, record=record)
        await self.channel.ask("/v1/live", Answer, deadline_s, body)

    async def leave(self, deadline_s: float, *, has_finished: bool = False) -> None:
        """Leave the run; untrained leased samples go to other clusters, immediately or after a
        while."""
        body = LeaveRun(id=self.id, has_finished=has_finished)
        await self.channel.ask("/v1/leave", Answer, deadline_s, body)

    async def reset_done(self, deadline_s: float) -> None:
        await self.channel.ask("/v1/reset-done", Answer, deadline_s, OnlyId(id=self.id))

    async def lease(self, samples: int, deadline_s: float) -> Sequence[Interval]:
        """Lease samples for this cluster alone."""
        self._leases += 1
        body = LeaseRequest(id=self.id, number=self._leases, samples=samples)
        return (await self.channel.ask("/v1/lease", LeaseAnswer, deadline_s, body)).samples

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
        """Upload a contribution, or the rest of it, and have it counted.

        Args: as in `Contribution`; path: its encoded bytes, which must not change during the call.

        Raises:
            HubRefusal: kind `late`: the outer step is decided without it; `refused`: it contains
                values that are not finite; `behind`: the state must be pulled first.
        """
        end = _now() + deadline_s
        hashes = await asyncio.to_thread(hash_chunks, path)
        contribution = Contribution(
            id=self.id,
            tokens=tokens,
            steps=steps,
            samples=list(samples),
            digest=digest_of(hashes),
        )
        parts = f"/v1/rounds/{outer_step}/parts/{self.id}"
        complete = f"/v1/rounds/{outer_step}/complete"
        is_measured = False
        while not is_measured:
            try:
                await self.channel.upload(parts, path, hashes, end - _now())
            except HubRefusal as error:
                # It was complete before this process was restarted.
                if error.kind not in ("counted", "sealed"):
                    raise
            try:
                answer = await self.channel.ask(
                    complete, ContributionAnswer, end - _now(), contribution, patience_s=_POLL_S
                )
                is_measured = answer.is_measured
            except HubRefusal as error:
                # After a crash, the hub has less than it had reported.
                if error.kind != "incomplete" or _now() > end:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def wait_round(self, outer_step: int, deadline_s: float) -> RoundAnswer:
        """Wait until an outer step is committed.

        Raises:
            DeadlineError: it is not committed by the deadline; the message lists the missing
                clusters.
        """
        end = _now() + deadline_s
        while True:
            wait_s = max(0.0, min(end - _now(), _POLL_S))
            place, left_s = f"/v1/rounds/{outer_step}?wait={wait_s:g}", max(end - _now(), 1.0)
            answer = await self.channel.ask(place, RoundAnswer, left_s, patience_s=wait_s)
            if answer.state == "committed":
                return answer
            if _now() >= end:
                waits = ", ".join(answer.waits_for) or "nobody"
                raise DeadlineError(
                    f"outer step {outer_step} is {answer.state} after {deadline_s:.0f} s; "
                    f"it waits for {waits}",
                    where=str(self.channel.line),
                    fix="check the clusters named above; `wait: time_boxed` does not wait for slow "
                    "clusters",
                )

    async def fetch_average(self, answer: RoundAnswer, target: Path, deadline_s: float) -> None:
        """Fetch the average of a committed outer step. See `HubConnection.download`.

        Raises:
            HubRefusal: kind `protocol`: its size is wrong for an average of this run.
        """
        assert self._joined is not None, "not joined"
        self._refuse(average_fault(self._joined, answer))
        place = f"/v1/rounds/{answer.outer_step}/average"
        await self.channel.download(place, answer.size_bytes, answer.digest, target, deadline_s)

    async def held(self, outer_step: int, deadline_s: float) -> bool:
        """Report that this cluster has an average; returns whether all living clusters have it by
        the deadline."""
        end = _now() + deadline_s
        while (left_s := end - _now()) > 0:
            place = f"/v1/rounds/{outer_step}/held?wait={min(left_s, _POLL_S):g}"
            answer = await self.channel.ask(
                place, HeldAnswer, left_s, OnlyId(id=self.id), patience_s=_POLL_S
            )
            if answer.is_everywhere:
                return True
        return False

    async def applied(self, outer_step: int, outer_params: str, deadline_s: float) -> None:
        """Report the digest of the outer parameters after an average."""
        body = Applied(id=self.id, outer_step=outer_step, outer_params=outer_params)
        await self.channel.ask("/v1/applied", Answer, deadline_s, body)

    # States.

    async def give_state(
        self, version: int, outer_params: Sequence[str], files: Sequence[Path], deadline_s: float
    ) -> None:
        """Upload the outer state, or the rest of it, for a cluster that is behind.

        Args: as in `StateOffer`; files: safetensors, which must not change during the call.
        """
        end = _now() + deadline_s
        hashes = [await asyncio.to_thread(hash_chunks, path) for path in files]
        offered = [
            StateFile(name=path.name, size_bytes=path.stat().st_size, digest=digest_of(each))
            for path, each in zip(files, hashes, strict=True)
        ]
        offer = StateOffer(
            id=self.id, version=version, outer_params=list(outer_params), files=offered
        )
        answer = await self.channel.ask("/v1/states", StateNumber, deadline_s, offer)
        state = f"/v1/states/{answer.state}"
        for index, (path, each) in enumerate(zip(files, hashes, strict=True)):
            place = f"{state}/files/{index}/from/{self.id}"
            await self.channel.upload(place, path, each, end - _now())
        place, body = f"{state}/complete", OnlyId(id=self.id)
        await self.channel.ask(place, Answer, end - _now(), body, patience_s=_SEAL_S)

    async def pull_state(self, folder: Path, deadline_s: float) -> StateAnswer:
        """Fetch the state from another cluster into a folder; resumes an interrupted transfer.

        Raises:
            DeadlineError: no state has arrived by the deadline; the message has its source.
            HubRefusal: kind `protocol`: its files are wrong for a state of this run.
        """
        end = _now() + deadline_s
        while True:
            left_s, body = max(1.0, end - _now()), OnlyId(id=self.id)
            answer = await self.channel.ask("/v1/state", StateAnswer, left_s, body)
            if answer.state is not None:
                assert self._joined is not None, "not joined"
                self._refuse(state_fault(self._joined, answer))
                folder.mkdir(exist_ok=True)
                try:
                    for index, file in enumerate(answer.files):
                        place, target = (
                            f"/v1/states/{answer.state}/files/{index}",
                            folder / file.name,
                        )
                        await self.channel.download(
                            place, file.size_bytes, file.digest, target, end - _now()
                        )
                    return answer
                except HubRefusal as error:
                    if (
                        error.kind != "no_state"
                    ):  # gone in the meantime: there will be a newer state
                        raise
            if _now() >= end:
                source = answer.source or "no cluster (no other living cluster is up to date)"
                raise DeadlineError(
                    f"no state has arrived within {deadline_s:.0f} s; it was requested from "
                    f"{source}",
                    where=str(self.channel.line),
                    fix="check the log of that cluster",
                )
            await asyncio.sleep(_AGAIN_S)

    def _refuse(self, fault: str) -> None:
        if fault:
            fix = "install the same version of isles on both machines; if the versions are equal, "
            fix += "do not trust the hub"
            raise HubRefusal("protocol", fault, where=str(self.channel.line), fix=fix)


class HubMeeting(Meeting):
    """A hub that runs separately.

    Args:
        join_file: file with the join line (mode 0600), read for each session.
    """

    refuser, they_are = "hub", "the hub is"

    def __init__(self, join_file: Path) -> None:
        self._join_file = join_file
        self._line: JoinLine | None = None

    async def open(self, client: ClientState) -> HubApi:
        self._line = JoinLine.read(self._join_file)
        return HubApi(self._line, client.first_join.id, up=client.up, down=client.down)

    def check(self) -> None:
        with suppress(ConfigError):
            if JoinLine.read(self._join_file) != self._line:
                raise RejoinError("there is a new join line")

    async def close(self, *, waits: bool) -> None:
        pass


def _now() -> float:
    return asyncio.get_running_loop().time()

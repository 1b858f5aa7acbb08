"""What a cluster asks of its hub, by name.

Every call ends by its deadline. A file that was cut off is gone on with, by either side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from isles.outer.client.http import Channel, DeadlineError, HubRefusal, RateLimit
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
    Shown,
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


class HubApi:
    """The requests of one cluster; for one event loop.

    Each method has a deadline in seconds, and raises `HubRefusal` where the hub says no, and
    `DeadlineError` where it is over.

    Args:
        member_id: 32 hexadecimal digits that this cluster keeps for the whole run.
        up, down: limits on files that are sent, and fetched; None: none.
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
        self.channel = Channel(line, member_id, up or RateLimit(0.0), down or RateLimit(0.0))
        self._leases = 0
        self._joined: Join | None = None

    async def __aenter__(self) -> HubApi:
        await self.channel.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()

    # Membership.

    async def join(self, join: Join, deadline_s: float) -> JoinAnswer:
        """Take part; also after a restart of this cluster, or where the hub forgot it."""
        answer = await self.channel.ask("/v1/join", JoinAnswer, deadline_s, join)
        self._leases, self._joined = 0, join
        return answer

    async def heartbeat(self, heartbeat: Heartbeat, deadline_s: float) -> HeartbeatAnswer:
        return await self.channel.ask("/v1/heartbeat", HeartbeatAnswer, deadline_s, heartbeat)

    async def show(self, record: str, deadline_s: float) -> None:
        """Show people what this cluster does; the hub keeps the newest."""
        body = Shown(id=self.id, record=record)
        await self.channel.ask("/v1/live", Answer, deadline_s, body)

    async def leave(self, deadline_s: float, *, has_finished: bool = False) -> None:
        """End; what was leased and not trained on goes to others, at once or after a while."""
        body = LeaveRun(id=self.id, has_finished=has_finished)
        await self.channel.ask("/v1/leave", Answer, deadline_s, body)

    async def reset_done(self, deadline_s: float) -> None:
        await self.channel.ask("/v1/reset-done", Answer, deadline_s, OnlyId(id=self.id))

    async def lease(self, samples: int, deadline_s: float) -> Sequence[Interval]:
        """Samples that are this cluster's alone."""
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
        """Send a contribution, or the rest of it, and have it counted.

        Args: as of `Contribution`; path: its encoded bytes, which must not change meanwhile.

        Raises:
            HubRefusal: kind `late`: the outer step is decided without it; `refused`: it holds
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
                # It was complete, before this process was started again.
                if error.kind not in ("counted", "sealed"):
                    raise
            try:
                answer = await self.channel.ask(
                    complete, ContributionAnswer, end - _now(), contribution, patience_s=_POLL_S
                )
                is_measured = answer.is_measured
            except HubRefusal as error:
                # The hub came back from a crash with less than it had said it has.
                if error.kind != "incomplete" or _now() > end:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def wait_round(self, outer_step: int, deadline_s: float) -> RoundAnswer:
        """Wait until an outer step is committed.

        Raises:
            DeadlineError: it is not by the deadline; says whom it waits for.
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
                    fix="look at the clusters named; `wait: time_boxed` goes on without the slow",
                )

    async def fetch_average(self, answer: RoundAnswer, target: Path, deadline_s: float) -> None:
        """Fetch the average of a committed outer step. See `Channel.download`.

        Raises:
            HubRefusal: kind `protocol`: it has not the size of an average of this run.
        """
        assert self._joined is not None, "not joined"
        self._refuse(average_fault(self._joined, answer))
        place = f"/v1/rounds/{answer.outer_step}/average"
        await self.channel.download(place, answer.size_bytes, answer.digest, target, deadline_s)

    async def held(self, outer_step: int, deadline_s: float) -> bool:
        """Report that an average lies here; whether, by the deadline, it does at all who live."""
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
        """Report which outer parameters an average has led to."""
        body = Applied(id=self.id, outer_step=outer_step, outer_params=outer_params)
        await self.channel.ask("/v1/applied", Answer, deadline_s, body)

    # States.

    async def give_state(
        self, version: int, outer_params: Sequence[str], files: Sequence[Path], deadline_s: float
    ) -> None:
        """Upload the outer state for a cluster that is behind, or the rest of it.

        Args: as of `StateOffer`; files: safetensors, which must not change meanwhile.
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
        """Fetch the state that another cluster gives into a folder; what is there is kept.

        Raises:
            DeadlineError: nobody has given it by the deadline; says who was asked.
            HubRefusal: kind `protocol`: it has not the files of a state of this run.
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
                    if error.kind != "no_state":  # gone meanwhile: there will be a newer one
                        raise
            if _now() >= end:
                source = answer.source or "nobody: no other cluster lives that is up to date"
                raise DeadlineError(
                    f"no state has come within {deadline_s:.0f} s; asked for it is {source}",
                    where=str(self.channel.line),
                    fix="look at the log of the cluster named",
                )
            await asyncio.sleep(_AGAIN_S)

    def _refuse(self, fault: str) -> None:
        if fault:
            fix = "install the same version of isles there and here; if it is, do not trust the hub"
            raise HubRefusal("protocol", fault, where=str(self.channel.line), fix=fix)


def _now() -> float:
    return asyncio.get_running_loop().time()

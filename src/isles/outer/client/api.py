"""What a cluster asks of its hub: requests by name, and whole files in chunks, both ways.

Every call ends by its deadline. A file that was cut off is gone on with, by either side.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType

from pydantic import RootModel

from isles.errors import CommunicationError
from isles.outer.client.http import Channel, HubRefusal, RateLimit
from isles.outer.messages import (
    CHUNK_BYTES,
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
    Received,
    RoundAnswer,
    StateAnswer,
    StateFile,
    StateNumber,
    StateOffer,
    chunk_size,
    digest_of,
    hash_chunks,
    num_chunks,
)
from isles.run.join_line import JoinLine

_POLL_S = 20.0
_AGAIN_S = 1.0
_SEAL_S = 300.0
_WRONG_HASHES = 3


class _Hashes(RootModel[list[str]]):
    pass


class HubApi:
    """The requests of one cluster; for one event loop.

    Each method has a deadline in seconds, and raises `HubRefusal` where the hub says no, and
    `CommunicationError` where the deadline is over.

    Args:
        member_id: 32 hexadecimal digits that this cluster keeps for the whole run.
        connections: so many chunks travel at a time.
        up_bytes_per_s: limit on what is sent; 0: none.
        down_bytes_per_s: limit on what is fetched; 0: none.
    """

    def __init__(
        self,
        line: JoinLine,
        member_id: str,
        *,
        connections: int = 4,
        up_bytes_per_s: float = 0.0,
        down_bytes_per_s: float = 0.0,
    ) -> None:
        self.id = member_id
        up, down = RateLimit(up_bytes_per_s), RateLimit(down_bytes_per_s)
        self.channel = Channel(line, connections, up, down)
        self._leases = 0

    async def __aenter__(self) -> HubApi:
        await self.channel.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.channel.close()

    async def join(self, join: Join, deadline_s: float) -> JoinAnswer:
        """Take part; also after a restart of this cluster, or where the hub forgot it."""
        answer = await self.channel.post("/v1/join", join, JoinAnswer, deadline_s)
        self._leases = 0
        return answer

    async def heartbeat(self, heartbeat: Heartbeat, deadline_s: float) -> HeartbeatAnswer:
        return await self.channel.post("/v1/heartbeat", heartbeat, HeartbeatAnswer, deadline_s)

    async def leave(self, deadline_s: float, *, has_finished: bool = False) -> None:
        """End; what was leased and not trained on goes to others, at once or after a while."""
        body = LeaveRun(id=self.id, has_finished=has_finished)
        await self.channel.post("/v1/leave", body, Answer, deadline_s)

    async def reset_done(self, deadline_s: float) -> None:
        await self.channel.post("/v1/reset-done", OnlyId(id=self.id), Answer, deadline_s)

    async def lease(self, samples: int, deadline_s: float) -> Sequence[Interval]:
        """Samples that are this cluster's alone."""
        self._leases += 1
        body = LeaseRequest(id=self.id, number=self._leases, samples=samples)
        return (await self.channel.post("/v1/lease", body, LeaseAnswer, deadline_s)).samples

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

        Args:
            outer_step: to which outer step.
            path: its encoded bytes; they must not change meanwhile.
            tokens: its weight.
            steps: inner steps in it.
            samples: trained on since the last contribution.
            deadline_s: for the whole.

        Raises:
            HubRefusal: kind `late`: the outer step is decided without it; `refused`: it holds
                values that are not finite; `behind`: the state must be pulled first.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        hashes = await asyncio.to_thread(hash_chunks, path)
        contribution = Contribution(
            id=self.id,
            tokens=tokens,
            steps=steps,
            samples=list(samples),
            digest=digest_of(hashes),
        )
        is_measured = False
        while not is_measured:
            try:
                await self._upload_part(outer_step, path, hashes, end - loop.time())
                place, left_s = f"/v1/rounds/{outer_step}/complete", end - loop.time()
                answer = await self.channel.post(
                    place, contribution, ContributionAnswer, left_s, attempt_s=2 * _POLL_S
                )
                is_measured = answer.is_measured
            except HubRefusal as error:
                # The hub came back from a crash with less than it had said it has.
                if error.kind != "incomplete" or loop.time() > end:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def _upload_part(
        self, outer_step: int, path: Path, hashes: Sequence[str], deadline_s: float
    ) -> None:
        place = f"/v1/rounds/{outer_step}/parts/{self.id}"
        try:
            await upload(self.channel, place, path, hashes, deadline_s)
        except HubRefusal as error:
            # It was complete, before this process was started again.
            if error.kind not in ("counted", "sealed"):
                raise

    async def wait_round(self, outer_step: int, deadline_s: float) -> RoundAnswer:
        """Wait until an outer step is committed.

        Raises:
            CommunicationError: it is not by the deadline; says whom it waits for.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        place = f"/v1/rounds/{outer_step}"
        while True:
            left_s = end - loop.time()
            wait_s = max(0.0, min(left_s, _POLL_S))
            answer = await self.channel.get(place, RoundAnswer, max(left_s, 1.0), wait_s)
            if answer.state == "committed":
                return answer
            if loop.time() >= end:
                waits = ", ".join(answer.waits_for) or "nobody"
                raise CommunicationError(
                    f"outer step {outer_step} is {answer.state} after {deadline_s:.0f} s; "
                    f"it waits for {waits}",
                    where=str(self.channel.line),
                    fix="look at the clusters named; `wait: time_boxed` goes on without the slow",
                )

    async def fetch_average(self, answer: RoundAnswer, target: Path, deadline_s: float) -> None:
        """Fetch the average of a committed outer step. See `download`."""
        place = f"/v1/rounds/{answer.outer_step}/average"
        await download(self.channel, place, answer.size_bytes, answer.digest, target, deadline_s)

    async def held(self, outer_step: int, deadline_s: float) -> bool:
        """Report that an average lies here; whether, by the deadline, it does at all who live."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while (left_s := end - loop.time()) > 0:
            place = f"/v1/rounds/{outer_step}/held?wait={min(left_s, _POLL_S):g}"
            body = OnlyId(id=self.id)
            answer = await self.channel.post(place, body, HeldAnswer, left_s, attempt_s=2 * _POLL_S)
            if answer.is_everywhere:
                return True
        return False

    async def applied(self, outer_step: int, outer_params: str, deadline_s: float) -> None:
        """Report which outer parameters an average has led to."""
        body = Applied(id=self.id, outer_step=outer_step, outer_params=outer_params)
        await self.channel.post("/v1/applied", body, Answer, deadline_s)

    async def give_state(
        self, version: int, outer_params: Sequence[str], files: Sequence[Path], deadline_s: float
    ) -> None:
        """Upload the outer state for a cluster that is behind, or the rest of it.

        Args:
            version: outer steps applied to it.
            outer_params: digest of each fragment's outer parameters.
            files: safetensors; they must not change meanwhile.
            deadline_s: for the whole.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        hashes = [await asyncio.to_thread(hash_chunks, path) for path in files]
        offered = [
            StateFile(name=path.name, size_bytes=path.stat().st_size, digest=digest_of(each))
            for path, each in zip(files, hashes, strict=True)
        ]
        offer = StateOffer(
            id=self.id, version=version, outer_params=list(outer_params), files=offered
        )
        state = (await self.channel.post("/v1/states", offer, StateNumber, deadline_s)).state
        for index, (path, each) in enumerate(zip(files, hashes, strict=True)):
            place = f"/v1/states/{state}/files/{index}/from/{self.id}"
            await upload(self.channel, place, path, each, end - loop.time())
        place, body = f"/v1/states/{state}/complete", OnlyId(id=self.id)
        await self.channel.post(place, body, Answer, end - loop.time(), attempt_s=_SEAL_S)

    async def pull_state(self, folder: Path, deadline_s: float) -> StateAnswer:
        """Fetch the state that another cluster gives into a folder; what is there is kept.

        Raises:
            CommunicationError: nobody has given it by the deadline; says who was asked.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            left_s = max(1.0, end - loop.time())
            answer = await self.channel.post("/v1/state", OnlyId(id=self.id), StateAnswer, left_s)
            if answer.state is not None:
                try:
                    folder.mkdir(exist_ok=True)
                    for index, file in enumerate(answer.files):
                        place, left_s = (
                            f"/v1/states/{answer.state}/files/{index}",
                            end - loop.time(),
                        )
                        size, target = file.size_bytes, folder / file.name
                        await download(self.channel, place, size, file.digest, target, left_s)
                    return answer
                except HubRefusal as error:
                    if error.kind != "no_state":  # gone meanwhile: there will be a newer one
                        raise
            if loop.time() >= end:
                source = answer.source or "nobody: no other cluster lives that is up to date"
                raise CommunicationError(
                    f"no state has come within {deadline_s:.0f} s; asked for it is {source}",
                    where=str(self.channel.line),
                    fix="look at the log of the cluster named",
                )
            await asyncio.sleep(_AGAIN_S)


async def upload(
    channel: Channel, place: str, path: Path, hashes: Sequence[str], deadline_s: float
) -> None:
    """Send the chunks of a file that the hub does not have.

    Args:
        place: the file's address there: GET says what is there, PUT …/CHUNK adds.
        hashes: of its chunks.
        deadline_s: for the whole.

    Raises:
        HubRefusal: the hub does not want the file.
        CommunicationError: the deadline is over.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    size_bytes = path.stat().st_size
    there = await channel.get(place, Received, deadline_s)
    if there.size_bytes != size_bytes:
        raise HubRefusal(
            "malformed",
            f"{path.name} has {size_bytes} bytes; the hub expects {there.size_bytes}",
            where=str(channel.line),
            fix="cut the same weights into the same pieces on all clusters",
        )
    missing = [i for i, sha256 in enumerate(hashes) if there.chunks.get(str(i)) != sha256]
    handle = os.open(path, os.O_RDONLY)
    try:

        async def send(index: int) -> None:
            size, start = chunk_size(size_bytes, index), index * CHUNK_BYTES
            data = await asyncio.to_thread(os.pread, handle, size, start)
            await channel.put(f"{place}/{index}", data, hashes[index], end - loop.time())

        await _in_parallel(send, missing, channel.connections)
    finally:
        os.close(handle)


async def download(
    channel: Channel, place: str, size_bytes: int, digest: str, target: Path, deadline_s: float
) -> None:
    """Fetch a file; what an earlier attempt has fetched of it is kept.

    Args:
        place: the file's address there.
        digest: of its chunks' hashes.
        target: where it shall lie; it is there only when it is whole.
        deadline_s: for the whole.

    Raises:
        HubRefusal: the hub does not have it (any more).
        CommunicationError: the deadline is over, or what comes is not what was announced.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s

    def wrong(what: str) -> CommunicationError:
        fix = "check the disk of the hub"
        return CommunicationError(f"{place}: {what}", where=str(channel.line), fix=fix)

    hashes = (await channel.get(f"{place}/hashes", _Hashes, deadline_s)).root
    if len(hashes) != num_chunks(size_bytes) or digest_of(hashes) != digest:
        raise wrong("the hashes of its chunks do not make up its digest")
    partial = target.with_name(f"{target.name}.partial")
    is_new = not partial.exists()
    handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, size_bytes)
        have = [] if is_new else await asyncio.to_thread(hash_chunks, partial)

        async def receive(index: int) -> None:
            size = chunk_size(size_bytes, index)
            for _ in range(_WRONG_HASHES):
                data = await channel.fetch(place, index * CHUNK_BYTES, size, end - loop.time())
                if hashlib.sha256(data).hexdigest() == hashes[index]:
                    await asyncio.to_thread(os.pwrite, handle, data, index * CHUNK_BYTES)
                    return
            raise wrong(f"chunk {index} came wrong {_WRONG_HASHES} times")

        missing = [i for i, sha256 in enumerate(hashes) if is_new or have[i] != sha256]
        await _in_parallel(receive, missing, channel.connections)
        await asyncio.to_thread(os.fsync, handle)
    finally:
        os.close(handle)
    partial.replace(target)


async def _in_parallel(
    work: Callable[[int], Awaitable[None]], indices: Sequence[int], workers: int
) -> None:
    left = iter(indices)

    async def worker() -> None:
        for index in left:
            await work(index)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(workers, len(indices))):
                group.create_task(worker())
    except ExceptionGroup as errors:  # the first failure ends all
        raise errors.exceptions[0] from None

"""Whole files to the rendezvous and from it: in chunks, in parallel, gone on with after any cut."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType

from pydantic import RootModel

from isles.errors import CommunicationError
from isles.outer.client.http import Channel, RateLimit, RendezvousRefusal
from isles.outer.messages import (
    CHUNK_BYTES,
    Answer,
    Applied,
    Beat,
    BeatAnswer,
    Claim,
    ClaimAnswer,
    Contribution,
    ContributionAnswer,
    HeldAnswer,
    Interval,
    Join,
    JoinAnswer,
    LeaveRun,
    OnlyId,
    StateAnswer,
    StateFile,
    StateOffer,
    TurnAnswer,
    chunk_size,
    digest_of,
    hash_chunks,
    num_chunks,
)
from isles.run.join_line import JoinLine

_WRONG_HASHES = 3


class Received(Answer):
    """What the rendezvous has of a file."""

    size_bytes: int
    chunks: dict[str, str]


class _Hashes(RootModel[list[str]]):
    pass


async def upload(
    channel: Channel, place: str, path: Path, hashes: Sequence[str], deadline_s: float
) -> None:
    """Send the chunks of a file that the rendezvous does not have.

    Args:
        channel: to the rendezvous.
        place: the file's address there: GET says what is there, PUT …/CHUNK adds.
        path: the file.
        hashes: of its chunks.
        deadline_s: for the whole.

    Raises:
        RendezvousRefusal: it does not want the file.
        CommunicationError: the deadline is over.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    size_bytes = path.stat().st_size
    there = await channel.get(place, Received, deadline_s)
    if there.size_bytes != size_bytes:
        raise RendezvousRefusal(
            "malformed",
            f"{path.name} has {size_bytes} bytes; the rendezvous expects {there.size_bytes}",
            where=str(channel.line),
            fix="cut the same weights into the same pieces on all clusters",
        )
    missing = [i for i, sha256 in enumerate(hashes) if there.chunks.get(str(i)) != sha256]
    handle = os.open(path, os.O_RDONLY)
    try:

        async def send(index: int) -> None:
            data = await asyncio.to_thread(
                os.pread, handle, chunk_size(size_bytes, index), index * CHUNK_BYTES
            )
            await channel.put(f"{place}/{index}", data, hashes[index], end - loop.time())

        await _in_parallel(send, missing, channel.connections)
    finally:
        os.close(handle)


async def download(
    channel: Channel, place: str, size_bytes: int, digest: str, target: Path, deadline_s: float
) -> None:
    """Fetch a file; what an earlier attempt has fetched of it is kept.

    Args:
        channel: to the rendezvous.
        place: the file's address there.
        size_bytes: its size.
        digest: of its chunks' hashes.
        target: where it shall lie; it is there only when it is whole.
        deadline_s: for the whole.

    Raises:
        RendezvousRefusal: the rendezvous does not have it (any more).
        CommunicationError: the deadline is over, or what comes is not what was announced.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    hashes = (await channel.get(f"{place}/hashes", _Hashes, deadline_s)).root
    if len(hashes) != num_chunks(size_bytes) or digest_of(hashes) != digest:
        raise _wrong(channel, place, "the hashes of its chunks do not make up its digest")
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
            raise _wrong(channel, place, f"chunk {index} came wrong {_WRONG_HASHES} times")

        missing = [i for i, sha256 in enumerate(hashes) if is_new or have[i] != sha256]
        await _in_parallel(receive, missing, channel.connections)
        await asyncio.to_thread(os.fsync, handle)
    finally:
        os.close(handle)
    partial.replace(target)


def _wrong(channel: Channel, place: str, what: str) -> CommunicationError:
    return CommunicationError(
        f"{place}: {what}", where=str(channel.line), fix="check the disk of the rendezvous"
    )


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
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


_POLL_S = 20.0
_AGAIN_S = 1.0
_SEAL_S = 300.0


class _Done(Answer):
    pass


class _Offered(Answer):
    state: int


class Client:
    """One cluster's side of the rendezvous; for one event loop.

    Args:
        line: the join line.
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
        self.channel = Channel(
            line, connections, RateLimit(up_bytes_per_s), RateLimit(down_bytes_per_s)
        )
        self._claims = 0

    async def __aenter__(self) -> Client:
        await self.channel.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.channel.__aexit__(kind, error, trace)

    async def join(self, join: Join, deadline_s: float) -> JoinAnswer:
        """Take part; also after a restart of this cluster, or where the rendezvous forgot it."""
        answer = await self.channel.post("/v1/join", join, JoinAnswer, deadline_s)
        self._claims = 0
        return answer

    async def beat(self, beat: Beat, deadline_s: float) -> BeatAnswer:
        """Say that this cluster lives; every 2 s."""
        return await self.channel.post("/v1/beat", beat, BeatAnswer, deadline_s)

    async def leave(self, deadline_s: float, *, has_finished: bool = False) -> None:
        """End: what was claimed and not trained on goes to others."""
        body = LeaveRun(id=self.id, has_finished=has_finished)
        await self.channel.post("/v1/leave", body, _Done, deadline_s)

    async def obeyed(self, deadline_s: float) -> None:
        """The order `reset` has been done."""
        await self.channel.post("/v1/obeyed", OnlyId(id=self.id), _Done, deadline_s)

    async def claim(self, samples: int, deadline_s: float) -> Sequence[Interval]:
        """Samples that are this cluster's alone."""
        self._claims += 1
        claim = Claim(id=self.id, number=self._claims, samples=samples)
        return (await self.channel.post("/v1/claim", claim, ClaimAnswer, deadline_s)).samples

    async def contribute(
        self,
        turn: int,
        path: Path,
        *,
        tokens: int,
        steps: int,
        samples: Sequence[Interval],
        deadline_s: float,
    ) -> ContributionAnswer:
        """Send a contribution, or the rest of it, and have it counted.

        Args:
            turn: to which turn.
            path: its encoded bytes; they must not change meanwhile.
            tokens: its weight.
            steps: inner steps in it.
            samples: trained on since the last contribution.
            deadline_s: for the whole.

        Raises:
            RendezvousRefusal: kind `late`: the turn is decided without it; `refused`: it holds
                values that are not finite; `behind`: the state must be pulled first.
            CommunicationError: the deadline is over.
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
        while True:
            try:
                await self._upload_part(turn, path, hashes, end - loop.time())
                while True:
                    answer = await self.channel.post(
                        f"/v1/turns/{turn}/complete",
                        contribution,
                        ContributionAnswer,
                        end - loop.time(),
                        attempt_s=2 * _POLL_S,
                    )
                    if answer.is_measured:
                        return answer
            except RendezvousRefusal as error:
                # The rendezvous came back from a crash with less than it had said it has.
                if error.kind != "incomplete" or loop.time() > end:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def _upload_part(
        self, turn: int, path: Path, hashes: Sequence[str], deadline_s: float
    ) -> None:
        place = f"/v1/turns/{turn}/parts/{self.id}"
        try:
            await upload(self.channel, place, path, hashes, deadline_s)
        except RendezvousRefusal as error:
            # It was, before this process was started again.
            if error.kind not in ("counted", "sealed"):
                raise

    async def turn(self, turn: int, deadline_s: float) -> TurnAnswer:
        """How a turn stands, now."""
        return await self.channel.get(f"/v1/turns/{turn}", TurnAnswer, deadline_s)

    async def wait_turn(self, turn: int, deadline_s: float) -> TurnAnswer:
        """Wait until a turn is committed.

        Raises:
            CommunicationError: it is not by the deadline; says whom it waits for.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            left = end - loop.time()
            answer = await self.channel.get(
                f"/v1/turns/{turn}", TurnAnswer, max(left, 1.0), max(0.0, min(left, _POLL_S))
            )
            if answer.state == "committed":
                return answer
            if loop.time() >= end:
                waits = ", ".join(answer.waits_for) or "nobody"
                raise CommunicationError(
                    f"turn {turn} is {answer.state} after {deadline_s:.0f} s; it waits for {waits}",
                    where=str(self.channel.line),
                    fix="look at the clusters named; `wait: time_boxed` goes on without the slow",
                )

    async def fetch_average(self, answer: TurnAnswer, target: Path, deadline_s: float) -> None:
        """Fetch the average of a committed turn. See `download`."""
        place = f"/v1/turns/{answer.turn}/average"
        await download(self.channel, place, answer.size_bytes, answer.digest, target, deadline_s)

    async def held(self, turn: int, deadline_s: float) -> bool:
        """Tell that the average of a turn lies here, and wait until it does at all who live.

        Returns:
            Whether it does.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while (left := end - loop.time()) > 0:
            place = f"/v1/turns/{turn}/held?wait={min(left, _POLL_S):g}"
            body = OnlyId(id=self.id)
            answer = await self.channel.post(place, body, HeldAnswer, left, attempt_s=2 * _POLL_S)
            if answer.is_everywhere:
                return True
        return False

    async def applied(self, turn: int, outer_params: str, deadline_s: float) -> None:
        """Tell which outer parameters an average has led to."""
        body = Applied(id=self.id, turn=turn, outer_params=outer_params)
        await self.channel.post("/v1/applied", body, _Done, deadline_s)

    async def give_state(
        self, version: int, outer_params: Sequence[str], files: Sequence[Path], deadline_s: float
    ) -> None:
        """Upload the outer state for a cluster that is behind, or the rest of it.

        Args:
            version: turns applied to them.
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
        state = (await self.channel.post("/v1/states", offer, _Offered, deadline_s)).state
        for index, (path, each) in enumerate(zip(files, hashes, strict=True)):
            place = f"/v1/states/{state}/files/{index}/from/{self.id}"
            await upload(self.channel, place, path, each, end - loop.time())
        await self.channel.post(
            f"/v1/states/{state}/complete",
            OnlyId(id=self.id),
            _Done,
            end - loop.time(),
            attempt_s=_SEAL_S,
        )

    async def pull_state(self, folder: Path, deadline_s: float) -> StateAnswer:
        """Fetch the state that another cluster gives; what is there of it already is kept.

        Args:
            folder: where its files shall lie.
            deadline_s: for the whole.

        Raises:
            CommunicationError: nobody has given it by the deadline; says who was asked.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            left = max(1.0, end - loop.time())
            answer = await self.channel.post("/v1/state", OnlyId(id=self.id), StateAnswer, left)
            if answer.state is not None:
                try:
                    return await self._fetch_state(answer, folder, end)
                except RendezvousRefusal as error:
                    if error.kind != "no_state":  # gone meanwhile: there will be a newer one
                        raise
            if loop.time() >= end:
                donor = answer.donor or "nobody: no other cluster lives that is up to date"
                raise CommunicationError(
                    f"no state has come within {deadline_s:.0f} s; asked for it is {donor}",
                    where=str(self.channel.line),
                    fix="look at the log of the cluster named",
                )
            await asyncio.sleep(_AGAIN_S)

    async def _fetch_state(self, answer: StateAnswer, folder: Path, end: float) -> StateAnswer:
        loop = asyncio.get_running_loop()
        folder.mkdir(exist_ok=True)
        for index, file in enumerate(answer.files):
            place = f"/v1/states/{answer.state}/files/{index}"
            target = folder / file.name
            await download(
                self.channel, place, file.size_bytes, file.digest, target, end - loop.time()
            )
        return answer

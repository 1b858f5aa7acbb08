"""Whole files to the rendezvous and from it: in chunks, in parallel, gone on with after any cut."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import RootModel

from isles.errors import CommunicationError
from isles.outer.client.http import Channel, RendezvousRefusal
from isles.outer.messages import CHUNK_BYTES, Answer, chunk_size, digest_of, hash_chunks, num_chunks

_WRONG_HASHES = 3


class Received(Answer):
    """What the rendezvous has of a file."""

    size_bytes: int
    chunks: dict[str, str]


class _Hashes(RootModel[list[str]]):
    """Hashes of a file's chunks, in order."""


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
    """Do a piece of work for each number, a few at a time; the first failure ends all."""
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

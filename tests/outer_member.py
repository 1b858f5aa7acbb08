"""Server and clients of a hub in one event loop, over TLS all the same."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isles.outer.client.api import HubApi
from isles.outer.client.client import HubClient
from isles.outer.hub.rules import Settings
from isles.outer.hub.server import Server
from isles.outer.messages import Heartbeat, HeartbeatAnswer, Join
from isles.run.join_line import JoinLine
from isles.run.records import write_secret
from tests.deadline import DEADLINE_S
from tests.outer_world import ZERO, member_id

FRAGMENTS = 2
OUTER_PARAMS = [ZERO] * FRAGMENTS
_PIECE = 1 << 17


@asynccontextmanager
async def serving(folder: Path, **rules: object) -> AsyncIterator[tuple[Server, JoinLine]]:
    server = Server(folder, Settings.model_validate(rules))
    line = await server.start("127.0.0.1", 0, "test")
    try:
        yield server, line
    finally:
        await server.stop()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def until_it(condition: Callable[[], object]) -> None:
    """Let the others of this loop go on until a condition holds."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


@asynccontextmanager
async def cluster_of(folder: Path, line: JoinLine, **more: Any) -> AsyncIterator[HubClient]:
    """The client of a cluster a that does not train, with a thread of its own."""
    write_secret(folder / "join", line.secret_text())
    own = {"join_file": folder / "join", "spool": folder / "spool", "note": str, **more}
    client = HubClient(join("a", 4), **own)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


def numbers(name: str, outer_step: int, elements: int) -> NDArray[np.float32]:
    """What a cluster contributes to a turn."""
    generator = np.random.default_rng([zlib.crc32(name.encode()), outer_step])
    return generator.standard_normal(elements, dtype=np.float32)


def join(
    name: str,
    elements: int,
    version: int = 0,
    outer_params: list[str] = OUTER_PARAMS,
    codec: str = "none",
) -> Join:
    """How a cluster joins whose fragments have so many numbers each."""
    pieces = [min(_PIECE, elements - start) for start in range(0, elements, _PIECE)]
    return Join(
        id=member_id(name),
        name=name,
        identity={"layout": "tests"},
        codec=codec,
        pieces=[pieces] * FRAGMENTS,
        version=version,
        outer_params=outer_params,
    )


async def beat(client: HubApi, version: int = 0) -> HeartbeatAnswer:
    return await client.heartbeat(Heartbeat(id=client.id, step=1, version=version), DEADLINE_S)


async def contribute(client: HubApi, folder: Path, outer_step: int, data: bytes) -> None:
    """Send a contribution of 10 tokens."""
    file = folder / f"{client.id}-{outer_step}"
    file.write_bytes(data)
    await client.contribute(outer_step, file, tokens=10, steps=1, samples=[], deadline_s=DEADLINE_S)


async def average_of(client: HubApi, folder: Path, outer_step: int) -> bytes:
    """Wait for a turn's average, and fetch it."""
    answer = await client.wait_round(outer_step, DEADLINE_S)
    target = folder / f"average-{outer_step}-{client.id}"
    await client.fetch_average(answer, target, DEADLINE_S)
    return target.read_bytes()


def next_outer_params(outer_params: str, average: bytes) -> str:
    """The digest of a fragment's outer parameters after an average."""
    return hashlib.sha256(outer_params.encode() + average).hexdigest()

"""A cluster for tests: contributes numbers that follow from its name, and goes on after any kill.

To be started by `tests.ranks`, as is the hub itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isles.outer.client.api import HubApi
from isles.outer.client.http import HubRefusal, RateLimit
from isles.outer.hub import __main__ as hub
from isles.outer.messages import Heartbeat, Join
from isles.run.env import RankEnv
from isles.run.join_line import JoinLine
from tests.deadline import DEADLINE_S

FRAGMENTS = 2
PIECE = 1 << 17
SAMPLES = 8
TOKENS = {"a": 100, "b": 200, "c": 300}


def pieces(elements: int) -> list[int]:
    """How a fragment is cut."""
    return [min(PIECE, elements - start) for start in range(0, elements, PIECE)]


def numbers(name: str, outer_step: int, elements: int) -> NDArray[np.float32]:
    """What a cluster contributes to a turn."""
    generator = np.random.default_rng([zlib.crc32(name.encode()), outer_step])
    return generator.standard_normal(elements, dtype=np.float32)


def member_id(name: str) -> str:
    """A cluster's id."""
    return name.encode().hex().rjust(32, "0")


def next_outer_params(outer_params: str, average: bytes) -> str:
    """The digest of a fragment's outer parameters after an average."""
    return hashlib.sha256(outer_params.encode() + average).hexdigest()


def join(name: str, elements: int, version: int, outer_params: list[str], **more: object) -> Join:
    """How a cluster of these tests joins."""
    body = {
        "id": member_id(name),
        "name": name,
        "identity": {"layout": "tests"},
        "codec": "none",
        "pieces": [pieces(elements)] * FRAGMENTS,
        "version": version,
        "outer_params": outer_params,
    }
    return Join.model_validate({**body, **more})


async def main(line: JoinLine, name: str, folder: Path, turns: int, elements: int, rate: float):
    """Take part in so many turns; what was applied stands in NAME.json, with each turn's hash."""
    record = folder / f"{name}.json"
    state = {"version": 0, "outer_params": ["0" * 64] * FRAGMENTS, "hashes": []}
    if record.exists():
        state = json.loads(record.read_text())
    async with HubApi(line, member_id(name), up=RateLimit(rate)) as client:
        await client.join(join(name, elements, state["version"], state["outer_params"]), DEADLINE_S)
        heartbeats = asyncio.create_task(_beat(client, state))
        for outer_step in range(state["version"], turns):
            file = folder / f"{name}-{outer_step}.part"
            file.write_bytes(numbers(name, outer_step, elements).tobytes())
            samples = await client.lease(SAMPLES, DEADLINE_S)
            try:
                await client.contribute(
                    outer_step,
                    file,
                    tokens=TOKENS[name],
                    steps=1,
                    samples=samples,
                    deadline_s=DEADLINE_S,
                )
            except HubRefusal as error:
                if error.kind != "late":
                    raise
            answer = await client.wait_round(outer_step, DEADLINE_S)
            average = folder / f"{name}-{outer_step}.average"
            await client.fetch_average(answer, average, DEADLINE_S)
            data = average.read_bytes()
            fragment = outer_step % FRAGMENTS
            state["outer_params"][fragment] = next_outer_params(
                state["outer_params"][fragment], data
            )
            state["hashes"].append(hashlib.sha256(data).hexdigest())
            state["version"] = outer_step + 1
            partial = record.with_suffix(".new")
            partial.write_text(json.dumps(state))
            partial.replace(record)
            await client.applied(outer_step, state["outer_params"][fragment], DEADLINE_S)
            file.unlink()
            average.unlink()
        heartbeats.cancel()


async def _beat(client: HubApi, state: dict) -> None:
    while True:
        heartbeat = Heartbeat(id=client.id, step=state["version"], version=state["version"])
        answer = await client.heartbeat(heartbeat, DEADLINE_S)
        assert not answer.command, f"{answer.command}: {answer.command_reason}"
        await asyncio.sleep(0.5)


def serve(env: RankEnv, state: Path, settings: Path) -> int:
    """A hub, until it is killed or told to end; its exit code."""
    return hub.main([str(state), "--run", "test", "--settings", str(settings)])


def take_part(
    env: RankEnv, line: Path, name: str, folder: Path, turns: int, elements: int, rate: float
) -> int:
    """A cluster, until it has taken part in so many turns."""
    asyncio.run(main(JoinLine.read(line), name, folder, turns, elements, rate))
    return 0

"""The hub with real processes and TLS over loopback: kills, cuts, strangers, stragglers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from isles.errors import CommunicationError
from isles.outer.client.api import HubApi, upload
from isles.outer.client.http import HubRefusal
from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Settings
from isles.outer.hub.samples import Samples
from isles.outer.hub.server import Server
from isles.outer.messages import CHUNK_BYTES, Heartbeat, hash_chunks
from isles.run.join_line import JoinLine, encode
from tests.deadline import DEADLINE_S
from tests.outer_member import (
    SAMPLES,
    TOKENS,
    join,
    member_id,
    next_outer_params,
    numbers,
    serve,
    take_part,
)
from tests.outer_world import overlaps, participants
from tests.ranks import Gang, start_ranks

TURNS = 20
ELEMENTS = 600_000
NAMES = ("a", "b", "c")
RATE = 8e6


def until(condition: Callable[[], object], what: str, every_s: float = 0.02) -> None:
    """Look again and again, for as long as a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S:.0f} s"
        time.sleep(every_s)


class Processes:
    """A hub and clusters, each a process that a test may kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.running: dict[str, Gang] = {}
        self.logs: list[Path] = []
        self.rules = folder / "rules.json"
        rules = {"wait": "all", "min_clusters": 3, "dead_after_s": 60.0}
        self.rules.write_text(json.dumps(rules))

    def _started(self, name: str, gang: Gang) -> None:
        self.running[name] = gang
        self.logs.append(gang.log)

    def serve(self) -> None:
        self._started("hub", start_ranks(serve, 1, self.state, self.rules))
        until((self.state / "join").exists, "the hub")

    def member(self, name: str) -> None:
        arguments = (self.state / "join", name, self.folder, TURNS, ELEMENTS, RATE)
        self._started(name, start_ranks(take_part, 1, *arguments))

    def kill(self, name: str) -> None:
        gang = self.running.pop(name)
        assert not gang.wait_or_timeout(0.0), f"{name} has ended by itself: {gang.log.read_text()}"
        gang.kill()

    def committed(self) -> int:
        with suppress(sqlite3.Error):
            journal = sqlite3.connect(f"file:{self.state / 'hub.sqlite'}?mode=ro", uri=True)
            try:
                sql = "SELECT COUNT(*) FROM rounds WHERE state = 'committed'"
                return int(journal.execute(sql).fetchone()[0])
            finally:
                journal.close()
        return 0

    def half_uploaded(self, name: str = "") -> bool:
        """Whether a contribution is on its way now: some of its chunks are there, not all."""
        number = _numbers(self)[name] if name else "*"
        for path in self.state.glob(f"rounds/*/{number}.part"):
            with suppress(OSError):
                if 0 < 512 * path.stat().st_blocks < 4 * ELEMENTS:
                    return True
        return False

    def stop(self) -> None:
        for gang in self.running.values():
            gang.kill()


def test_kills_at_any_instant_lose_nothing_and_split_nobody(tmp_path: Path) -> None:
    """A cluster killed in mid upload; the hub in mid upload, mid average, after a commit."""
    world = Processes(tmp_path)
    try:
        world.serve()
        for name in NAMES:
            world.member(name)
        until(lambda: world.committed() >= 2, "two turns")

        until(lambda: world.half_uploaded("b"), "an upload of b")
        world.kill("b")
        world.member("b")
        killed_at = world.committed()
        until(lambda: world.committed() >= killed_at + 2, "turns after b was killed")

        until(world.half_uploaded, "an upload")
        world.kill("hub")
        world.serve()
        killed_at = world.committed()
        until(lambda: world.committed() >= killed_at + 2, "turns after the first kill")

        until(lambda: list(world.state.glob("rounds/*/average.partial")), "an average", 2e-3)
        world.kill("hub")
        assert list(world.state.glob("rounds/*/average.partial")), "it was done already"
        world.serve()
        killed_at = world.committed()
        until(lambda: world.committed() > killed_at, "a turn after the second kill")
        world.kill("hub")  # right after a commit
        world.serve()

        for name in NAMES:
            assert world.running[name].wait() == [0]
        world.running["hub"].processes[0].terminate()
        assert world.running["hub"].wait() == [0]
    finally:
        world.stop()

    hashes = [json.loads((tmp_path / f"{name}.json").read_text())["hashes"] for name in NAMES]
    assert len(hashes[0]) == TURNS and hashes[0] == hashes[1] == hashes[2]
    for outer_step in range(TURNS):  # and they are the averages of all, weighted by tokens
        assert hashes[0][outer_step] == _expected(outer_step)
    journal = Journal(world.state / "hub.sqlite")
    samples = Samples(journal)
    assert overlaps(journal) == []
    assert samples.counts()["averaged"] == TURNS * len(NAMES) * SAMPLES
    assert participants(journal) == [[1, 2, 3]] * TURNS
    journal.close()
    token = (world.state / "token").read_text().strip()
    for log in world.logs:
        text = log.read_text(errors="replace")
        assert token not in text and "Traceback" not in text, text


def _numbers(world: Processes) -> dict[str, int]:
    journal = sqlite3.connect(f"file:{world.state / 'hub.sqlite'}?mode=ro", uri=True)
    try:
        return dict(journal.execute("SELECT name, number FROM members").fetchall())
    finally:
        journal.close()


def _expected(outer_step: int) -> str:
    total = np.zeros(ELEMENTS, np.float32)
    for name in NAMES:
        total += numbers(name, outer_step, ELEMENTS) * np.float32(
            TOKENS[name] / sum(TOKENS.values())
        )
    return hashlib.sha256(total.tobytes()).hexdigest()


# One process: a server and clients in one event loop, over TLS all the same.


@asynccontextmanager
async def serving(folder: Path, **rules: object) -> AsyncIterator[tuple[Server, JoinLine]]:
    server = Server(folder, Settings.model_validate(rules))
    line = await server.start("127.0.0.1", 0, "test")
    try:
        yield server, line
    finally:
        await server.stop()


async def part(client: HubApi, folder: Path, outer_step: int, data: bytes, name: str = "a"):
    file = folder / f"{name}-{outer_step}"
    file.write_bytes(data)
    return await client.contribute(
        outer_step, file, tokens=10, steps=1, samples=[], deadline_s=DEADLINE_S
    )


def test_strangers_and_nonsense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(_unknown(tmp_path))
    assert "Traceback" not in caplog.text


async def _unknown(folder: Path) -> None:
    elements = CHUNK_BYTES // 4 + 10
    outer_params = ["0" * 64] * 2
    async with serving(folder / "state") as (_, line):
        wrong = replace(line, token=encode(bytes(32)))
        async with HubApi(wrong, member_id("a")) as client:
            with pytest.raises(HubRefusal, match="token is not") as refusal:
                await client.join(join("a", elements, 0, outer_params), DEADLINE_S)
            assert refusal.value.kind == "token"
        other = replace(line, fingerprint=bytes(32))
        async with HubApi(other, member_id("a")) as client:
            with pytest.raises(CommunicationError, match="certificate with sha256"):
                await client.join(join("a", elements, 0, outer_params), DEADLINE_S)
        nobody = replace(line, port=1)
        async with HubApi(nobody, member_id("a")) as client:
            with pytest.raises(CommunicationError, match="has not worked for 1 s"):
                await client.join(join("a", elements, 0, outer_params), 1.0)
        for garbage in (b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff"):
            with socket.create_connection((line.host, line.port)) as unknown:
                unknown.sendall(garbage)

        headers = {"Authorization": f"Bearer {line.token}"}
        pin = aiohttp.Fingerprint(line.fingerprint)
        async with (
            aiohttp.ClientSession(line.url, connector=aiohttp.TCPConnector(ssl=pin)) as http,
            HubApi(line, member_id("a")) as client,
        ):
            async with http.get("/v1/status") as answer:
                assert answer.status == 401
            async with http.put("/no/such/thing", data=b"x" * 100_000) as answer:
                assert answer.status == 401  # before anything else is said
            await client.join(join("a", elements, 0, outer_params), DEADLINE_S)
            place = f"/v1/rounds/0/parts/{member_id('a')}"
            chunk = bytes(CHUNK_BYTES)
            zeros = hashlib.sha256(chunk).hexdigest()
            for path, data, sha256, status, kind in [
                (f"{place}/0", chunk, "0" * 64, 422, "hash"),
                (f"{place}/0", b"short", zeros, 422, "malformed"),
                (f"{place}/2", chunk, zeros, 422, "malformed"),
                (f"{place}/-1", chunk, zeros, 404, "http"),
                ("/v1/rounds/99/parts/" + member_id("a") + "/0", chunk, zeros, 409, "early"),
                ("/v1/rounds/0/parts/" + member_id("z") + "/0", chunk, zeros, 404, "unknown"),
                ("/v1/rounds/0/parts/..%2f..%2ftoken/0", chunk, zeros, 404, "http"),
                (f"/v1/states/1/files/0/from/{member_id('a')}/0", chunk, zeros, 404, "no_state"),
            ]:
                async with http.put(
                    path, data=data, headers={**headers, "X-Sha256": sha256}
                ) as answer:
                    found = (answer.status, (await answer.json()).get("kind"))
                    assert found == (status, kind), path
            for body in (b"\xff\xfe", b"[]", b'{"id": 1}', b"{" * 100_000):
                async with http.post("/v1/heartbeat", data=body, headers=headers) as answer:
                    assert answer.status == 422
            async with http.post("/v1/heartbeat", data=bytes(17 << 20), headers=headers) as answer:
                assert answer.status == 413

            # Refused in words, by name; the others go on.
            bad = numbers("a", 0, elements)
            bad[elements // 2] = np.nan
            with pytest.raises(HubRefusal, match="contribution of a to round 0 is refused"):
                await part(client, folder, 0, bad.tobytes())
            heartbeat = await client.heartbeat(
                Heartbeat(id=client.id, step=1, version=0), DEADLINE_S
            )
            assert heartbeat.command == "reset" and "round 0" in heartbeat.command_reason
            assert (await client.wait_round(0, DEADLINE_S)).size_bytes == 0
            for outer_step in (1, 2):
                await part(client, folder, outer_step, numbers("a", outer_step, elements).tobytes())
                await client.wait_round(outer_step, DEADLINE_S)
            with pytest.raises(HubRefusal, match="decided without") as refusal:
                await part(client, folder, 0, numbers("a", 0, elements).tobytes())
            assert refusal.value.kind == "late"
            # What was counted is counted once, also for a process that was started again.
            await part(client, folder, 2, numbers("a", 2, elements).tobytes())
            with pytest.raises(HubRefusal, match="bytes; the hub expects"):
                await part(client, folder, 3, b"1234")
        assert not list((folder / "state").glob("**/*token*/*"))


def test_a_straggler_catches_up_and_a_newcomer_pulls_the_state_over_a_cut(tmp_path: Path) -> None:
    asyncio.run(_straggler(tmp_path))


async def _straggler(folder: Path) -> None:
    elements = 1000
    zero = ["0" * 64] * 2
    rules = {"wait": "time_boxed", "time_box_s": 0.01, "keep_averages": 4, "dead_after_s": 600.0}
    async with (
        serving(folder / "state", **rules) as (_, line),
        HubApi(line, member_id("a")) as a,
        HubApi(line, member_id("b")) as b,
        HubApi(line, member_id("c")) as c,
    ):
        assert (await a.join(join("a", elements, 0, zero), DEADLINE_S)).standing == "first"
        assert (await b.join(join("b", elements, 0, zero), DEADLINE_S)).standing == "current"
        outer_params = list(zero)

        async def one_turn(outer_step: int) -> None:
            await part(a, folder, outer_step, numbers("a", outer_step, elements).tobytes())
            answer = await a.wait_round(outer_step, DEADLINE_S)
            assert answer.weights == {"a": 10}
            target = folder / "average"
            await a.fetch_average(answer, target, DEADLINE_S)
            outer_params[outer_step % 2] = next_outer_params(
                outer_params[outer_step % 2], target.read_bytes()
            )
            await a.applied(outer_step, outer_params[outer_step % 2], DEADLINE_S)

        for outer_step in range(3):
            await one_turn(outer_step)
        # b was away for three turns: it applies them one after the other.
        late = await b.join(join("b", elements, 0, zero), DEADLINE_S)
        assert (late.standing, late.outer_step) == ("late", 3)
        own = list(zero)
        for outer_step in range(3):
            target = folder / f"b-average-{outer_step}"
            answer = await b.wait_round(outer_step, DEADLINE_S)
            await b.fetch_average(answer, target, DEADLINE_S)
            own[outer_step % 2] = next_outer_params(own[outer_step % 2], target.read_bytes())
            await b.applied(outer_step, own[outer_step % 2], DEADLINE_S)
        assert own == outer_params
        assert (await b.join(join("b", elements, 3, own), DEADLINE_S)).standing == "current"

        # c is new: b is away, so a gives it its state; both ways are cut in the middle.
        for outer_step in range(3, 6):
            await one_turn(outer_step)
        assert (await c.join(join("c", elements, 0, zero), DEADLINE_S)).standing == "behind"
        pulling = asyncio.create_task(c.pull_state(folder / "pulled", DEADLINE_S))
        while not (await a.heartbeat(Heartbeat(id=a.id, step=1, version=6), DEADLINE_S)).send_state:
            assert not pulling.done()
        header = json.dumps({"__metadata__": {"version": "6"}}).encode()
        body = len(header).to_bytes(8, "little") + header + os.urandom(3 * CHUNK_BYTES)
        state = folder / "outer-params.safetensors"
        state.write_bytes(body)
        at_six = list(outer_params)
        a.channel.up.bytes_per_s = 4e6
        giving = asyncio.create_task(a.give_state(6, at_six, [state], DEADLINE_S))
        sent = a.channel.sent_bytes
        await _cut(giving, lambda: a.channel.sent_bytes > sent)
        assert sent < a.channel.sent_bytes < sent + len(body)
        await one_turn(6)
        a.channel.up.bytes_per_s = 0.0
        c.channel.down.bytes_per_s = 4e6
        await a.give_state(6, at_six, [state], DEADLINE_S)
        assert a.channel.sent_bytes <= sent + len(body) + 4 * elements + 4 * CHUNK_BYTES // 4
        await _cut(pulling, lambda: c.channel.received_bytes > 0)
        assert 0 < c.channel.received_bytes < len(body)
        c.channel.down.bytes_per_s = 0.0
        pulled = await c.pull_state(folder / "pulled", DEADLINE_S)
        # What was there was not fetched again, but for a chunk that was cut off before it was kept.
        assert len(body) <= c.channel.received_bytes <= len(body) + CHUNK_BYTES
        assert (pulled.version, pulled.outer_params, pulled.source) == (6, at_six, "a")
        assert (folder / "pulled" / state.name).read_bytes() == body
        assert (await c.join(join("c", elements, 6, at_six), DEADLINE_S)).standing == "late"
        target = folder / "c-average"
        await c.fetch_average(await c.wait_round(6, DEADLINE_S), target, DEADLINE_S)
        own = [next_outer_params(at_six[0], target.read_bytes()), at_six[1]]
        assert own == outer_params
        assert (await c.join(join("c", elements, 7, own), DEADLINE_S)).standing == "current"
        with pytest.raises(CommunicationError, match="outer step 7 is future after 0 s"):
            await c.wait_round(7, 0.2)


async def _cut(task: asyncio.Task, condition: Callable[[], bool]) -> None:
    """End a transfer in its middle."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            assert not task.done(), task
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.long
def test_a_rate_limit_holds(tmp_path: Path) -> None:
    asyncio.run(_rate(tmp_path))


async def _rate(folder: Path) -> None:
    rate = 6e6
    elements = 3 * CHUNK_BYTES // 4
    async with (
        serving(folder / "state") as (server, line),
        HubApi(line, member_id("a"), up_bytes_per_s=rate, down_bytes_per_s=rate) as client,
    ):
        await client.join(join("a", elements, 0, ["0" * 64] * 2), DEADLINE_S)
        await server.work.check_codec(join("a", elements, 0, ["0" * 64] * 2))  # torch is there
        file = folder / "part"
        file.write_bytes(numbers("a", 0, elements).tobytes())
        hashes = hash_chunks(file)
        start = time.monotonic()
        await upload(client.channel, f"/v1/rounds/0/parts/{client.id}", file, hashes, DEADLINE_S)
        seconds = {"up": time.monotonic() - start}
        await part(client, folder, 0, file.read_bytes())
        answer = await client.wait_round(0, DEADLINE_S)
        start = time.monotonic()
        await client.fetch_average(answer, folder / "average", DEADLINE_S)
        seconds["down"] = time.monotonic() - start
        assert (folder / "average").read_bytes() == file.read_bytes()
    for way, measured in seconds.items():
        # Never faster; a machine that is busy may well be slower.
        assert 4 * elements / measured < 1.1 * rate, way


def test_it_ends_by_itself_also_where_a_cluster_never_comes_back(tmp_path: Path) -> None:
    asyncio.run(_left_alone(tmp_path))


async def _left_alone(folder: Path) -> None:
    async with (
        serving(folder / "state") as (server, line),
        HubApi(line, member_id("a")) as a,
        HubApi(line, member_id("b")) as b,
    ):
        await a.join(join("a", 100, 0, ["0" * 64] * 2), DEADLINE_S)
        await b.join(join("b", 100, 0, ["0" * 64] * 2), DEADLINE_S)
        await b.leave(DEADLINE_S)
        ending = asyncio.create_task(server.work.finished(DEADLINE_S, alone_s=0.2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ending), 1.0)  # a may still train
        await a.leave(DEADLINE_S, has_finished=True)
        await asyncio.wait_for(ending, DEADLINE_S)

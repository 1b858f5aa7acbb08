"""The hub and its clients over TLS: who knows no token, cuts, newcomers, the end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from isles.errors import CommunicationError
from isles.monitor.live.readers import reader_of
from isles.outer.client.api import HubApi
from isles.outer.client.http import HubRefusal
from isles.outer.hub.core import Core, events
from isles.outer.messages import CHUNK_BYTES, RoundAnswer, read_body
from isles.run.join_line import ask_hub, encode
from isles.run.process import ProcessId
from isles.run.records import write_secret
from tests.deadline import DEADLINE_S
from tests.outer_member import (
    OUTER_PARAMS,
    average_of,
    beat,
    cluster_of,
    contribute,
    in_loop,
    join,
    next_outer_params,
    numbers,
    serving,
    until_it,
)
from tests.outer_world import member_id
from tests.run_records import recorded_run


@in_loop
async def test_strangers_and_nonsense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path
    elements = CHUNK_BYTES // 4 + 10
    async with serving(folder / "state") as (_, line):
        for other, error, says, deadline_s in (
            (replace(line, token=encode(bytes(32))), HubRefusal, "token is not", DEADLINE_S),
            (replace(line, fingerprint=bytes(32)), CommunicationError, "certificate", DEADLINE_S),
            (replace(line, port=1), CommunicationError, "has not worked for 1 s", 1.0),
        ):
            async with HubApi(other, member_id("a")) as client:
                with pytest.raises(error, match=says):
                    await client.join(join("a", elements), deadline_s)
        for garbage in (b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff"):
            with socket.create_connection((line.host, line.port)) as unknown:
                unknown.sendall(garbage)

        headers = {"Authorization": f"Bearer {line.token}"}
        pin = aiohttp.Fingerprint(line.fingerprint)
        async with (
            aiohttp.ClientSession(line.url, connector=aiohttp.TCPConnector(ssl=pin)) as http,
            HubApi(line, member_id("a")) as client,
        ):
            async with http.put("/no/such/thing", data=b"x" * 100_000) as answer:
                assert answer.status == 401  # before anything else is said
            await client.join(join("a", elements), DEADLINE_S)
            place = f"/v1/rounds/0/parts/{member_id('a')}"
            chunk = bytes(CHUNK_BYTES)
            zeros = hashlib.sha256(chunk).hexdigest()
            for path, data, sha256, status, kind in [
                (f"{place}/0", chunk, "0" * 64, 422, "hash"),
                (f"{place}/0", b"short", zeros, 422, "malformed"),
                (f"{place}/2", chunk, zeros, 422, "malformed"),
                (f"{place}/-1", chunk, zeros, 404, "http"),
                (place.replace("/0/", "/99/") + "/0", chunk, zeros, 409, "early"),
                (f"/v1/rounds/0/parts/{member_id('z')}/0", chunk, zeros, 404, "unknown"),
                ("/v1/rounds/0/parts/..%2f..%2ftoken/0", chunk, zeros, 404, "http"),
                (f"/v1/states/1/files/0/from/{member_id('a')}/0", chunk, zeros, 404, "no_state"),
            ]:
                named = {**headers, "X-Sha256": sha256}
                async with http.put(path, data=data, headers=named) as answer:
                    found = (answer.status, (await answer.json()).get("kind"))
                    assert found == (status, kind), path
            for body, status in (
                (b"\xff\xfe", 422),
                (b"[]", 422),
                (b'{"id": 1}', 422),
                (b"{" * 100_000, 422),
                (bytes(17 << 20), 413),
            ):
                async with http.post("/v1/heartbeat", data=body, headers=headers) as answer:
                    assert answer.status == status

            # Refused in words, by name; the others go on.
            bad = numbers("a", 0, elements)
            bad[elements // 2] = np.nan
            with pytest.raises(HubRefusal, match="contribution of a to round 0 is refused"):
                await contribute(client, folder, 0, bad.tobytes())
            answered = await beat(client)
            assert answered.command == "reset" and "round 0" in answered.command_reason
            assert (await client.wait_round(0, DEADLINE_S)).size_bytes == 0
            good = numbers("a", 1, elements).tobytes()
            await contribute(client, folder, 1, good)
            assert await average_of(client, folder, 1) == good
            with pytest.raises(HubRefusal, match="decided without") as refusal:
                await contribute(client, folder, 0, good)
            assert refusal.value.kind == "late"
            # What was counted is counted once, also for a process that was started again.
            await contribute(client, folder, 1, good)
            with pytest.raises(HubRefusal, match="bytes; the hub expects"):
                await contribute(client, folder, 2, b"1234")

            size = len(good)
            for part, status in {
                f"{size - 4}-{size + 9}": 206,  # as much as there is
                "0-": 206,
                "-4": 206,
                f"{size}-{size + 9}": 416,
                f"{2**63}-{2**63 + 1}": 416,
                "9-2": 416,
            }.items():
                asked = {**headers, "Range": f"bytes={part}"}
                async with http.get("/v1/rounds/1/average", headers=asked) as answer:
                    assert answer.status == status, part
                    if status == 206:
                        assert good.endswith(await answer.read())

            async def trickle() -> AsyncIterator[bytes]:
                for start in range(0, CHUNK_BYTES, 1 << 15):
                    await asyncio.sleep(0.02)
                    yield chunk[start : start + (1 << 15)]

            place = f"/v1/rounds/2/parts/{member_id('a')}"
            named = {**headers, "X-Sha256": zeros, "Content-Length": str(CHUNK_BYTES)}
            for _ in range(2):  # over one connection
                async with http.put(f"{place}/0", data=trickle(), headers=named) as answer:
                    assert answer.status == 200
        assert not list((folder / "state").glob("**/*token*/*"))
    assert "Traceback" not in caplog.text


@in_loop
async def test_a_newcomer_pulls_the_state_over_a_cut(tmp_path: Path) -> None:
    """a gives it; both ways are cut in the middle."""
    folder, elements = tmp_path, 1000
    async with (
        serving(folder / "state", keep_averages=4, dead_after_s=600.0) as (_, line),
        HubApi(line, member_id("a")) as a,
        HubApi(line, member_id("c")) as c,
    ):
        assert (await a.join(join("a", elements), DEADLINE_S)).standing == "first"
        outer_params = list(OUTER_PARAMS)

        async def apply(client: HubApi, outer_step: int, held: list[str]) -> None:
            place, average = outer_step % 2, await average_of(client, folder, outer_step)
            held[place] = next_outer_params(held[place], average)
            await client.applied(outer_step, held[place], DEADLINE_S)

        async def one_turn(outer_step: int) -> None:
            await contribute(a, folder, outer_step, numbers("a", outer_step, elements).tobytes())
            await apply(a, outer_step, outer_params)

        for outer_step in range(6):
            await one_turn(outer_step)
        assert (await c.join(join("c", elements), DEADLINE_S)).standing == "behind"
        pulling = asyncio.create_task(c.pull_state(folder / "pulled", DEADLINE_S))
        while not (await beat(a, version=6)).send_state:
            assert not pulling.done()
        header = json.dumps({"__metadata__": {"version": "6"}}).encode()
        body = len(header).to_bytes(8, "little") + header + os.urandom(3 * CHUNK_BYTES)
        state = folder / "outer-params.safetensors"
        state.write_bytes(body)
        at_six = list(outer_params)
        a.channel.up.bytes_per_s = 4e6
        giving = asyncio.create_task(a.give_state(6, at_six, [state], DEADLINE_S))
        sent = a.channel.up.total
        await _cut(giving, lambda: a.channel.up.total > sent)
        assert sent < a.channel.up.total < sent + len(body)
        await one_turn(6)
        a.channel.up.bytes_per_s = 0.0
        c.channel.down.bytes_per_s = 4e6
        await a.give_state(6, at_six, [state], DEADLINE_S)
        assert a.channel.up.total <= sent + len(body) + 4 * elements + CHUNK_BYTES
        await _cut(pulling, lambda: c.channel.down.total > 0)
        assert 0 < c.channel.down.total < len(body)
        c.channel.down.bytes_per_s = 0.0
        pulled = await c.pull_state(folder / "pulled", DEADLINE_S)
        # What was there was not fetched again, but for a chunk that was cut off before it was kept.
        assert len(body) <= c.channel.down.total <= len(body) + CHUNK_BYTES
        assert (pulled.version, pulled.outer_params, pulled.source) == (6, at_six, "a")
        assert (folder / "pulled" / state.name).read_bytes() == body
        assert (await c.join(join("c", elements, 6, at_six), DEADLINE_S)).standing == "late"
        await apply(c, 6, at_six)
        assert at_six == outer_params
        assert (await c.join(join("c", elements, 7, at_six), DEADLINE_S)).standing == "current"
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


@in_loop
async def test_an_average_that_died_with_its_hub_is_no_reason_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub before this one had committed the outer step, which this one still collects."""
    wait = HubApi.wait_round
    found = [
        RoundAnswer(
            outer_step=0,
            state="committed",
            contributed=[],
            waits_for=[],
            weights={"a": 10},
            digest="0" * 64,
            size_bytes=16,
            is_kept=True,
        )
    ]

    async def wait_round(self: HubApi, outer_step: int, deadline_s: float) -> RoundAnswer:
        return found.pop() if found else await wait(self, outer_step, deadline_s)

    monkeypatch.setattr(HubApi, "wait_round", wait_round)
    async with serving(tmp_path / "state") as (server, line):

        def times_joined() -> int:
            return sum(event["kind"] == "joined" for event in events(server.work.core))

        async with cluster_of(tmp_path, line) as client:
            await until_it(lambda: times_joined() > 1 or client.state.refusal)
            assert client.state.refusal is None


OWN = {"phase": "training", "step": 3, "outer": {"outer_step": 0, "is_connected": True}}


@in_loop
async def test_clusters_show_themselves_through_the_hub(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "state") as (_, line),
        cluster_of(tmp_path, line, shows=lambda: "YQ=="),
    ):
        found: dict[str, dict[str, str]] = {}
        while "a" not in found:
            await asyncio.sleep(0.05)
            answer = await asyncio.to_thread(ask_hub, line, "/v1/live", DEADLINE_S)
            found = answer["members"]
        assert found["a"]["record"] == "YQ=="
        # A run that has joined from elsewhere is shown with all that the hub shows.
        launch = {**ProcessId.of(os.getpid()).record(), "launcher": "local"}
        run_dir, _ = recorded_run(tmp_path / "own-1", launch, status=OWN)
        write_secret(run_dir.join_line, line.secret_text())
        for is_own, names in ((False, ["own-1", "a"]), (True, ["own-1"])):
            reader = reader_of(run_dir, 2.0, is_own=is_own)
            look = await asyncio.to_thread(reader.look)
            assert look is not None and [row.name for row in look.clusters] == names


@in_loop
async def test_a_hub_that_shows_nobody_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of an earlier version, which has no such address."""

    def show(*_: object) -> None:
        raise web.HTTPNotFound

    monkeypatch.setattr(Core, "show", show)
    async with serving(tmp_path / "state") as (server, line):
        heartbeats = server.work.core.membership.heartbeats
        async with cluster_of(tmp_path, line, shows=lambda: "YQ==") as client:
            refused = "does not show this cluster: 404"
            await until_it(lambda: refused in caplog.text and heartbeats)
            heartbeats.clear()
            await until_it(lambda: heartbeats)
            assert client.state.is_connected and client.state.lost_at is None
            assert sum(e["kind"] == "joined" for e in events(server.work.core)) == 1


@in_loop
async def test_it_ends_by_itself_also_where_a_cluster_never_comes_back(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "state") as (server, line),
        HubApi(line, member_id("a")) as a,
        HubApi(line, member_id("b")) as b,
    ):
        await a.join(join("a", 100), DEADLINE_S)
        await b.join(join("b", 100), DEADLINE_S)
        await b.leave(DEADLINE_S)
        ending = asyncio.create_task(server.work.finished(DEADLINE_S, alone_s=0.2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ending), 1.0)  # a may still train
        await a.leave(DEADLINE_S, has_finished=True)
        await asyncio.wait_for(ending, DEADLINE_S)


@in_loop
async def test_the_beginning_of_a_body_is_heard_though_no_more_comes(tmp_path: Path) -> None:
    """Else a line of a few KB/s would count as silent."""
    bodies: list[web.Request] = []
    whole = os.urandom(1 << 18)

    async def take(request: web.Request) -> web.Response:
        bodies.append(request)
        found = await read_body(request.content, request.transport, len(whole))
        return web.Response(status=200 if found == whole else 500)

    app = web.Application()
    app.add_routes([web.put("/", take)])
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        await web.SockSite(runner, listening).start()
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        head = f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(whole)}\r\n\r\n".encode()
        for _ in range(2):
            writer.write(head + whole[:1])
            for there in (1, 9000):
                await until_it(lambda n=there: bodies and bodies[0].content.total_bytes == n)
                writer.write(whole[there : 9000 if there == 1 else None])
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"\r\n\r\n")
            bodies.clear()
        writer.close()
        await runner.cleanup()

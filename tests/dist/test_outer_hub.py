"""The hub and its clients over TLS: strangers, broken clusters, full disks, its death."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from isles.errors import CommunicationError
from isles.monitor.live.readers import reader_of
from isles.outer import messages
from isles.outer.body import read_body
from isles.outer.client.api import HubApi, HubMeeting
from isles.outer.client.client import HubClient
from isles.outer.client.http import HubRefusal
from isles.outer.hub import __main__ as hub
from isles.outer.hub import acceptor
from isles.outer.hub.core import HubCore, events
from isles.outer.hub.journal import JOURNAL
from isles.outer.hub.rules import Settings
from isles.outer.hub.server import Server
from isles.outer.messages import CHUNK_BYTES, Heartbeat, RoundAnswer
from isles.outer.state_file import state_head
from isles.run.join_line import JoinLine, ask_hub, encode
from isles.run.process import ProcessId
from isles.run.records import write_secret
from tests.deadline import DEADLINE_S, run_program
from tests.disks import small_disk
from tests.outer_deaths import TURNS, open_world
from tests.outer_world import ZERO, joining, member_id, overlaps
from tests.run_records import recorded_run

FRAGMENTS = 2


def _ask_over(connection: socket.socket, request: bytes) -> bytes:
    with ssl._create_unverified_context().wrap_socket(connection) as wrapped:
        wrapped.sendall(request)
        return wrapped.recv(4096)


@asynccontextmanager
async def serving(folder: Path, **rules: object) -> AsyncIterator[tuple[Server, JoinLine]]:
    """A hub in the event loop of the test, over TLS all the same."""
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
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.05)


@asynccontextmanager
async def cluster_of(folder: Path, line: JoinLine, **more: Any) -> AsyncIterator[HubClient]:
    """The client of a cluster a that does not train, with a thread of its own."""
    write_secret(folder / "join", line.secret_text())
    own = {"meeting": HubMeeting(folder / "join"), "spool": folder / "spool", "note": str, **more}
    client = HubClient(join("a", 4), **own)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


def numbers(outer_step: int, elements: int) -> np.ndarray:
    """What a cluster contributes to a turn."""
    return np.random.default_rng(outer_step).standard_normal(elements, dtype=np.float32)


def join(name: str, elements: int, **more: Any) -> messages.Join:
    """How a cluster joins whose fragments have so many numbers each."""
    size = 1 << 17
    pieces = [min(size, elements - start) for start in range(0, elements, size)]
    return joining(name, FRAGMENTS, pieces=[pieces] * FRAGMENTS, **more)


def digest_of_numbers(data: bytes) -> str:
    """The digest of a fragment's outer parameters."""
    size = 4 << 17
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in pieces)).hexdigest()


async def beat(client: HubApi, version: int = 0) -> Any:
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


@in_loop
async def test_strangers_of_one_address_end_no_connection_of_another(tmp_path):
    async with serving(tmp_path) as (_, line):
        place = line.host, line.port
        far = await asyncio.to_thread(socket.create_connection, place)  # long round trips
        with ExitStack() as strangers, far:
            for _ in range(400):
                made = strangers.enter_context(socket.socket())
                made.bind(("127.0.0.2", 0))
                await asyncio.to_thread(made.connect, place)
            ask = (
                f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {line.token}\r\n\r\n"
            )
            answer = await asyncio.to_thread(_ask_over, far, ask.encode())
        assert answer.startswith(b"HTTP/1.1 200 ")


@in_loop
async def test_connections_of_many_addresses_end_few_of_a_member(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptor, "_MOST", 30)
    async with serving(tmp_path, max_clusters=1) as (_, line):
        async with HubApi(line, member_id("a")) as client:
            await client.join(joining("a"), DEADLINE_S)
        token = f"Host: x\r\nAuthorization: Bearer {line.token}\r\n"
        ask = f"GET /v1/rounds/0 HTTP/1.1\r\n{token}"
        own = f"{ask}X-Member: {member_id('a')}\r\n\r\n".encode()
        context = ssl._create_unverified_context()

        def connect(address: str, sent: bytes) -> ssl.SSLSocket:
            place = line.host, line.port
            made = socket.create_connection(place, DEADLINE_S, source_address=(address, 0))
            wrapped = stack.enter_context(context.wrap_socket(made))
            again(wrapped, sent)
            return wrapped

        def again(wrapped: ssl.SSLSocket, sent: bytes) -> None:
            wrapped.sendall(sent)
            found = b""
            while b"is_kept" not in found:
                more = wrapped.recv(4096)
                assert more, found
                found += more

        with ExitStack() as stack:
            mine = [await asyncio.to_thread(connect, "127.0.0.1", own) for _ in range(10)]
            for number in range(60):
                other = f"{ask}X-Member: {number:032x}\r\n\r\n".encode()
                await asyncio.to_thread(connect, f"127.0.1.{number + 1}", other)
            for each in mine:
                await asyncio.to_thread(again, each, own)


@in_loop
async def test_many_who_ask_for_the_status_share_it(tmp_path):
    async with serving(tmp_path) as (server, line):
        statements = list[str]()
        server.work.core.journal._db.set_trace_callback(statements.append)
        headers = {"Authorization": f"Bearer {line.token}"}
        pin = aiohttp.Fingerprint(line.fingerprint)
        connector = aiohttp.TCPConnector(ssl=pin, limit=50)
        async with aiohttp.ClientSession(line.url, connector=connector, headers=headers) as http:

            async def ask() -> int:
                async with http.get("/v1/status") as answer:
                    return len((await answer.json())["events"])

            found = await asyncio.gather(*(ask() for _ in range(200)))
        assert min(found) > 0
        assert len([text for text in statements if "FROM events" in text]) < 100


@in_loop
async def test_bytes_that_are_no_text_are_no_bug_of_the_hub(tmp_path, caplog):
    places = ("X-Member", "X-Sha256", "Content-Encoding", "Range", "If-Range", "Cookie")
    places += ("If-Modified-Since", "If-None-Match", "Content-Type", "Accept-Encoding")
    paths = ("status", "no/such/thing", "rounds/0/average", "rounds/0?wait=%ff%00", "%0a%1b", "%ff")
    failed = []
    async with serving(tmp_path / "state") as (_, line):
        async with HubApi(line, member_id("a")) as client:
            await client.join(join("a", 4), DEADLINE_S)
        for path in (*paths, f"rounds/0/parts/{member_id('a')}"):
            for place in places:
                for value in (b"\xff" * 32, b"bytes=0-" + b"9" * 5000):
                    head = f"GET /v1/{path} HTTP/1.1\r\nHost: x\r\n{place}: ".encode()
                    more = f"\r\nAuthorization: Bearer {line.token}\r\nConnection: close\r\n\r\n"
                    answer = await _ask(line, head + value + more.encode())
                    if answer.split(b" ")[1:2] in ([b"500"], [b"401"], []):
                        failed.append((path, place, value[:8], answer[:99]))
    assert failed == []
    assert "Traceback" not in caplog.text and "a bug of the hub" not in caplog.text


@in_loop
async def test_strangers_and_nonsense(tmp_path, caplog):
    """Refused in words; and no secret stands anywhere."""
    caplog.set_level(logging.DEBUG)
    folder, state, elements = tmp_path, tmp_path / "state", CHUNK_BYTES // 4 + 10
    async with serving(state) as (_, line):
        for other, error, says, deadline_s in (
            (replace(line, token=encode(bytes(32))), HubRefusal, "token is not", DEADLINE_S),
            (replace(line, fingerprint=bytes(32)), CommunicationError, "certificate", DEADLINE_S),
            (replace(line, port=1), CommunicationError, "failed for 1 s", 1.0),
        ):
            async with HubApi(other, member_id("a")) as client:
                with pytest.raises(error, match=says):
                    await client.join(join("a", elements), deadline_s)
        for garbage in (b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff"):
            with socket.create_connection((line.host, line.port)) as unknown:
                unknown.sendall(garbage)
        # Without the token nothing costs anything.
        head = b"PUT /v1/rounds/0/parts/x/0 HTTP/1.1\r\nHost: x\r\n"
        large = head + b"Content-Length: 999999999999\r\n\r\n" + bytes(1 << 20)
        bearer = b"Authorization: Bearer " + b"\xff" * 43 + b"\r\nContent-Length: 0\r\n\r\n"
        for request in (large, head + bearer):
            assert b"401" in (await _ask(line, request)).splitlines()[0]
        both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nabc"
        for request in (head + b"X: " + b"y" * 100_000 + b"\r\n\r\n", head + both):
            answer = await _ask(line, request)
            assert not answer or b" 400 " in answer.splitlines()[0], answer[:200]

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
                (place.replace("/0/", "/99/") + "/0", chunk, zeros, 409, "early"),
                (f"/v1/rounds/0/parts/{member_id('z')}/0", chunk, zeros, 404, "unknown"),
                ("/v1/rounds/0/parts/..%2f..%2ftoken/0", chunk, zeros, 404, "http"),
                (f"/v1/states/1/files/0/from/{member_id('a')}/0", chunk, zeros, 404, "no_state"),
            ]:
                named = {**headers, "X-Sha256": sha256}
                async with http.put(path, data=data, headers=named) as answer:
                    found = (answer.status, (await answer.json()).get("kind"))
                    assert found == (status, kind), path
            for body, status in ((b"\xff\xfe", 422), (b'{"id": 1}', 422), (bytes(17 << 20), 413)):
                async with http.post("/v1/heartbeat", data=body, headers=headers) as answer:
                    assert answer.status == status

            # Refused in words, by name; the others go on.
            bad = numbers(0, elements)
            bad[elements // 2] = np.nan
            with pytest.raises(HubRefusal, match="contribution of a to round 0 is refused"):
                await contribute(client, folder, 0, bad.tobytes())
            answered = await beat(client)
            assert answered.command == "reset" and "round 0" in answered.command_reason
            assert (await client.wait_round(0, DEADLINE_S)).size_bytes == 0
            good = numbers(1, elements).tobytes()
            await contribute(client, folder, 1, good)
            assert await average_of(client, folder, 1) == good
            with pytest.raises(HubRefusal, match="decided without") as refusal:
                await contribute(client, folder, 0, good)
            assert refusal.value.kind == "late"
            # What was counted is counted once, also for a process that was started again.
            await contribute(client, folder, 1, good)
            with pytest.raises(HubRefusal, match="bytes, but the hub expects"):
                await contribute(client, folder, 2, b"1234")

            for path in ("/v1/status", "/v1/rounds/0"):
                async with http.get(path, headers=headers) as answer:
                    text = await answer.text()
                    assert answer.status == 200
                    assert member_id("a") not in text and line.token not in text
            async with http.get("/v1/run-file", headers=headers) as answer:
                assert answer.status == 404
                assert "without a run file" in (await answer.json())["what"]
            (state / "run.yaml").write_text("name: tiny\n")
            async with http.get("/v1/run-file", headers=headers) as answer:
                assert await answer.json() == {"run": "test", "text": "name: tiny\n"}
            async with HubApi(line, member_id("z")) as unknown:
                with pytest.raises(HubRefusal) as refusal:
                    await beat(unknown)
                assert member_id("z") not in str(refusal.value)

            size = len(good)
            known = (f"{size - 4}-{size + 9}", "0-", "-4")  # of the first as much as there is
            for part in (*known, f"{size}-{size + 9}", f"{2**63}-{2**63 + 1}", "9-2"):
                status = 206 if part in known else 416
                asked = {**headers, "Range": f"bytes={part}"}
                async with http.get("/v1/rounds/1/average", headers=asked) as answer:
                    assert answer.status == status, part
                    if status == 206:
                        assert good.endswith(await answer.read())
        assert not list(state.glob("**/*token*/*"))
    for words in ("Traceback", line.token, member_id("a")):
        assert words not in caplog.text
    for path in state.rglob("*"):
        if path.is_file() and path.name not in ("token", "join"):
            assert line.token.encode() not in path.read_bytes(), path


@in_loop
async def test_a_newcomer_pulls_the_state_over_a_cut(tmp_path):
    """a gives it; both ways are cut in the middle."""
    folder, elements = tmp_path, 1 << 18
    async with (
        serving(folder / "state", keep_averages=4, dead_after_s=600.0) as (_, line),
        HubApi(line, member_id("a")) as a,
        HubApi(line, member_id("c")) as c,
    ):
        assert (await a.join(join("a", elements), DEADLINE_S)).standing == "first"
        outer_params = [ZERO] * FRAGMENTS

        async def apply(client: HubApi, outer_step: int, held: list[str]) -> None:
            place, average = outer_step % 2, await average_of(client, folder, outer_step)
            held[place] = digest_of_numbers(average)  # it is what the weights are
            await client.applied(outer_step, held[place], DEADLINE_S)

        async def one_turn(outer_step: int) -> None:
            await contribute(a, folder, outer_step, numbers(outer_step, elements).tobytes())
            await apply(a, outer_step, outer_params)

        for outer_step in range(6):
            await one_turn(outer_step)
        assert (await c.join(join("c", elements), DEADLINE_S)).standing == "behind"
        pulling = asyncio.create_task(c.pull_state(folder / "pulled", DEADLINE_S))
        while not (await beat(a, version=6)).send_state:
            assert not pulling.done()
        files = [folder / f"fragment-{place}.safetensors" for place in range(FRAGMENTS)]
        for place, state in enumerate(files):
            head = state_head("a", place, 6, elements, has_momentum=True)
            weights = numbers(4 + place, elements).tobytes()
            state.write_bytes(head + weights + numbers(9 + place, elements).tobytes())
        size = sum(state.stat().st_size for state in files)
        at_six = list(outer_params)
        a.channel.up.bytes_per_s = 4e6
        giving = asyncio.create_task(a.give_state(6, at_six, files, DEADLINE_S))
        sent = a.channel.up.total
        await _cut(giving, lambda: a.channel.up.total > sent)
        assert sent < a.channel.up.total < sent + size
        await one_turn(6)
        a.channel.up.bytes_per_s = 0.0
        c.channel.down.bytes_per_s = 4e6
        await a.give_state(6, at_six, files, DEADLINE_S)
        assert a.channel.up.total <= sent + size + 4 * elements + CHUNK_BYTES
        await _cut(pulling, lambda: c.channel.down.total > 0)
        assert 0 < c.channel.down.total < size
        c.channel.down.bytes_per_s = 0.0
        pulled = await c.pull_state(folder / "pulled", DEADLINE_S)
        # What was there was not fetched again, but for a chunk that was cut off before it was kept.
        assert size <= c.channel.down.total <= size + CHUNK_BYTES
        assert (pulled.version, pulled.outer_params, pulled.source) == (6, at_six, "a")
        for state in files:
            assert (folder / "pulled" / state.name).read_bytes() == state.read_bytes()
        again = functools.partial(join, "c", elements, outer_params=at_six)
        assert (await c.join(again(version=6), DEADLINE_S)).standing == "late"
        await apply(c, 6, at_six)
        assert at_six == outer_params
        assert (await c.join(again(version=7), DEADLINE_S)).standing == "current"
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
async def test_an_average_that_died_with_its_hub_is_no_reason_to_leave(tmp_path, monkeypatch):
    """The hub before this one had committed the outer step, which this one still collects."""
    wait = HubApi.wait_round
    average = {"weights": {"a": 10}, "digest": "0" * 64, "size_bytes": 16, "is_kept": True}
    members: dict[str, list[str]] = {"contributed": [], "waits_for": []}
    found = [RoundAnswer(outer_step=0, state="committed", **members, **average)]

    async def wait_round(self: HubApi, outer_step: int, deadline_s: float) -> RoundAnswer:
        return found.pop() if found else await wait(self, outer_step, deadline_s)

    monkeypatch.setattr(HubApi, "wait_round", wait_round)
    async with serving(tmp_path / "state") as (server, line), cluster_of(tmp_path, line) as client:
        await until_it(lambda: times_joined(server) > 1 or client.state.refusal)
        assert client.state.refusal is None


def times_joined(server: Server) -> int:
    return sum(event["kind"] == "joined" for event in events(server.work.core))


@in_loop
async def test_clusters_show_themselves_through_the_hub(tmp_path):
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
        own = {"phase": "training", "step": 3, "outer": {"outer_step": 0, "is_connected": True}}
        run_dir, _ = recorded_run(tmp_path / "own-1", launch, status=own)
        write_secret(run_dir.join_line, line.secret_text())
        for is_own, names in ((False, ["own-1", "a"]), (True, ["own-1"])):
            reader = reader_of(run_dir, 2.0, is_own=is_own)
            look = await asyncio.to_thread(reader.look)
            assert look is not None and [row.name for row in look.clusters] == names


@in_loop
async def test_a_hub_that_shows_nobody_is_no_loss(tmp_path, monkeypatch, caplog):
    """As one of an earlier version, which has no such address."""

    def show(*_: object) -> None:
        raise web.HTTPNotFound

    monkeypatch.setattr(HubCore, "show", show)
    async with serving(tmp_path / "state") as (server, line):
        heartbeats = server.work.core.membership.heartbeats
        async with cluster_of(tmp_path, line, shows=lambda: "YQ==") as client:
            refused = "does not show this cluster: 404"
            await until_it(lambda: refused in caplog.text and heartbeats)
            heartbeats.clear()
            await until_it(lambda: heartbeats)
            assert client.state.is_connected and client.state.lost_at is None
            assert times_joined(server) == 1


@in_loop
async def test_it_ends_by_itself_also_where_a_cluster_never_comes_back(tmp_path):
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
async def test_the_beginning_of_a_body_is_heard_though_no_more_comes():
    """Else a line of a few KB/s would count as silent."""
    bodies: list[web.Request] = []
    whole = os.urandom(1 << 18)

    async def take(request: web.Request) -> web.Response:
        bodies.append(request)
        found = await read_body(request.content, request.transport, len(whole))
        return web.Response(status=200 if found == whole else 500)

    app = web.Application()
    app.add_routes([web.put("/", take)])
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        head = f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(whole)}\r\n\r\n".encode()
        for _ in range(2):
            writer.write(head + whole[:1])
            for there, more in ((1, 9000), (9000, len(whole))):
                await until_it(lambda n=there: bodies and bodies[0].content.total_bytes == n)
                writer.write(whole[there:more])
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"\r\n\r\n")
            bodies.clear()
        writer.close()


async def _ask(line: JoinLine, request: bytes) -> bytes:
    """What the hub answers to raw bytes; nothing where it hangs up."""
    context = ssl._create_unverified_context()
    reader, writer = await asyncio.open_connection(line.host, line.port, ssl=context)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(4096), DEADLINE_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@in_loop
async def test_a_full_disk_is_named_and_gone_on_from(tmp_path, caplog):
    disk, filler, elements = tmp_path / "state", tmp_path / "state" / "filler", 1 << 19
    data = numbers(0, elements).tobytes()  # 2 MiB
    with small_disk(disk, "12m"):
        async with (
            serving(disk, dead_after_s=600.0) as (_, line),
            HubApi(line, member_id("a")) as a,
        ):
            await a.join(join("a", elements), DEADLINE_S)
            await contribute(a, tmp_path, 0, data)
            await a.wait_round(0, DEADLINE_S)
            for outer_step, room in ((1, 0), (2, 5 << 19)):  # not even a lease; a part, no average
                found = os.statvfs(disk)
                filler.write_bytes(bytes(found.f_bavail * found.f_bsize - room))
                sending = asyncio.create_task(contribute(a, tmp_path, outer_step, data))
                leasing = asyncio.create_task(a.lease(8, DEADLINE_S))
                waiting = asyncio.create_task(a.wait_round(outer_step, 3.0))
                await asyncio.wait({waiting})
                assert waiting.exception() is not None, "decided on a full disk"
                filler.unlink()
                await sending
                assert len(await leasing) == 1
                assert await average_of(a, tmp_path, outer_step) == data
                await a.applied(outer_step, "1" * 64, DEADLINE_S)
    assert "disk" in caplog.text and "Traceback" not in caplog.text
    assert caplog.text.count("trying again") < 50, "it does not wait between its tries"


def test_a_hub_that_dies_at_any_instant_goes_on(tmp_path):
    done = run_program([sys.executable, "-m", "tests.outer_deaths", str(tmp_path / "state")])
    assert done.returncode == 0, done.stderr
    deaths, longest = map(int, done.stdout.split())
    assert deaths > 40 and longest == 20, (deaths, longest)
    world = open_world(tmp_path / "state")
    assert overlaps(world.core.journal) == []
    assert world.core.samples.counts() == {"averaged": TURNS * 2 * 3}
    for outer_step in range(TURNS):
        answer = world.answer(outer_step)
        assert answer.weights == {"a": 1, "b": 2}
        data = world.core.rounds.average_path(outer_step).read_bytes()
        one, two = (np.float32(outer_step + n) * np.float32(n / 3) for n in (1, 2))
        assert set(np.frombuffer(data, np.float32).tolist()) == {float(one + two)}
        path = tmp_path / "average"
        path.write_bytes(data)
        assert messages.digest_of(messages.hash_chunks(path)) == answer.digest


def test_what_it_is_told_wrongly_is_named(tmp_path, capsys):
    state, rules = tmp_path / "state", tmp_path / "rules.json"
    rules.write_text('{"wait": "never"}')
    before = os.umask(0o022)
    try:
        for arguments, says in [
            (("--listen", "nowhere"), "not a valid address"),
            (("--listen", "203.0.113.1:1"), "cannot listen on 203.0.113.1:1"),
            (("--settings", str(rules)), "wait"),
        ]:
            assert hub.main([str(state), "--run", "tiny", *arguments]) in (1, 5)
            said = capsys.readouterr().err
            assert says in said and "fix:" in said
    finally:
        os.umask(before)
    for name in ("token", JOURNAL):
        assert (state / name).stat().st_mode & 0o777 == 0o600

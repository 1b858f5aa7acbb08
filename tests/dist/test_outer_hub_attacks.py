"""The hub against strangers, broken clusters, full disks, and death at any instant."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from isles.outer.client.api import HubApi
from isles.outer.client.http import HubRefusal
from isles.outer.hub import __main__ as hub
from isles.outer.hub.journal import JOURNAL
from isles.outer.messages import digest_of, hash_chunks
from isles.run.join_line import JoinLine
from tests.deadline import DEADLINE_S
from tests.disks import small_disk
from tests.outer_deaths import TURNS, open_world
from tests.outer_member import average_of, beat, contribute, in_loop, join, numbers, serving
from tests.outer_world import member_id, overlaps


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


def test_silent_connections_keep_nobody_out(tmp_path: Path) -> None:
    """More of them than files that a process may have open, where it leaves its limit as it is."""
    hub_words = [sys.executable, "-m", "isles.outer.hub", str(tmp_path / "state"), "--run", "t"]
    words = ["bash", "-c", 'ulimit -Sn 128 && exec "$@"', "-", *hub_words]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None and "is open" in process.stdout.readline()
        line = JoinLine.parse((tmp_path / "state" / "join").read_text())
        for _ in range(300):
            stack.enter_context(socket.create_connection((line.host, line.port), DEADLINE_S))
        request = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"
        assert b"401" in asyncio.run(_ask(line, request)).splitlines()[0]


@in_loop
async def test_no_request_without_the_token_costs_anything(tmp_path: Path) -> None:
    async with serving(tmp_path / "state") as (_, line):
        head = b"PUT /v1/rounds/0/parts/x/0 HTTP/1.1\r\nHost: x\r\n"
        large = head + b"Content-Length: 999999999999\r\n\r\n" + bytes(1 << 20)
        assert b"401" in (await _ask(line, large)).splitlines()[0]
        bearer = b"Authorization: Bearer " + b"\xff" * 43 + b"\r\nContent-Length: 0\r\n\r\n"
        assert b"401" in (await _ask(line, head + bearer)).splitlines()[0]
        for nonsense in (
            head + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            head + b"Content-Length: -1\r\n\r\n",
            head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        ):
            answer = await _ask(line, nonsense)
            assert not answer or b" 400 " in answer.splitlines()[0], answer[:200]


def test_secrets_stand_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = asyncio.run(_secrets(tmp_path))
    assert token not in caplog.text and member_id("a") not in caplog.text
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name not in ("token", "join"):
            assert token.encode() not in path.read_bytes(), path


async def _secrets(folder: Path) -> str:
    async with serving(folder / "state") as (_, line), HubApi(line, member_id("a")) as client:
        await client.join(join("a", 10), DEADLINE_S)
        headers = {"Authorization": f"Bearer {line.token}"}
        connector = aiohttp.TCPConnector(ssl=aiohttp.Fingerprint(line.fingerprint))
        async with aiohttp.ClientSession(line.url, connector=connector, headers=headers) as http:
            for path in ("/v1/status", "/v1/rounds/0"):
                async with http.get(path) as answer:
                    text = await answer.text()
                    assert answer.status == 200 and member_id("a") not in text
                    assert line.token not in text
            async with http.get("/v1/run-file") as answer:
                assert answer.status == 404
                assert "without a run file" in (await answer.json())["what"]
            (folder / "state" / "run.yaml").write_text("name: tiny\n")
            async with http.get("/v1/run-file") as answer:
                assert await answer.json() == {"run": "test", "text": "name: tiny\n"}
        with pytest.raises(HubRefusal) as refusal:
            async with HubApi(line, member_id("z")) as unknown:
                await beat(unknown)
        assert member_id("z") not in str(refusal.value)
        return line.token


def test_a_full_disk_is_named_and_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "state", "12m"):
        asyncio.run(_full(tmp_path, tmp_path / "state"))
    assert "disk" in caplog.text and "Traceback" not in caplog.text
    assert caplog.text.count("tried again") < 50, "it does not wait between its tries"


async def _full(folder: Path, disk: Path) -> None:
    elements = 1 << 19  # 2 MiB each
    data = numbers("a", 0, elements).tobytes()
    async with serving(disk, dead_after_s=600.0) as (_, line), HubApi(line, member_id("a")) as a:
        await a.join(join("a", elements), DEADLINE_S)
        await contribute(a, folder, 0, data)
        await a.wait_round(0, DEADLINE_S)
        for outer_step, room in ((1, 0), (2, 5 << 19)):  # not even a lease; a part, but no average
            filler = disk / "filler"
            _fill(filler, room)
            sending = asyncio.create_task(contribute(a, folder, outer_step, data))
            leasing = asyncio.create_task(a.lease(8, DEADLINE_S))
            waiting = asyncio.create_task(a.wait_round(outer_step, 3.0))
            await asyncio.wait({waiting})
            assert waiting.exception() is not None, "decided on a full disk"
            filler.unlink()
            await sending
            assert len(await leasing) == 1
            assert await average_of(a, folder, outer_step) == data
            await a.applied(outer_step, "1" * 64, DEADLINE_S)


def _fill(path: Path, room: int) -> None:
    """Leave so many bytes free on a disk."""
    found = os.statvfs(path.parent)
    with path.open("wb") as stream:
        stream.write(bytes(found.f_bavail * found.f_bsize - room))


def test_a_hub_that_dies_at_any_instant_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.outer_deaths", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
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
        assert digest_of(hash_chunks(path)) == answer.digest


def test_what_it_is_told_wrongly_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, rules = tmp_path / "state", tmp_path / "rules.json"
    rules.write_text('{"wait": "never"}')
    before = os.umask(0o022)
    try:
        for arguments, says in [
            (("--listen", "nowhere"), "no address"),
            (("--listen", "203.0.113.1:1"), "cannot listen at 203.0.113.1:1"),
            (("--settings", str(rules)), "wait"),
        ]:
            assert hub.main([str(state), "--run", "tiny", *arguments]) in (1, 5)
            said = capsys.readouterr().err
            assert says in said and "fix:" in said
    finally:
        os.umask(before)
    for name in ("token", JOURNAL):
        assert (state / name).stat().st_mode & 0o777 == 0o600

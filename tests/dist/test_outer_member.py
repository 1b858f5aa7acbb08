"""The hub's process over TLS: strangers who hold connections, and a member that means harm."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import socket
import ssl
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from isles.outer.client.api import HubApi
from isles.outer.client.http import HubRefusal
from isles.outer.messages import Heartbeat, digest_of
from isles.outer.state_file import state_head
from isles.run.join_line import JoinLine, _Pinned
from tests.deadline import DEADLINE_S, until
from tests.outer_world import ZERO, joining, member_id


@contextmanager
def hub(folder: Path, *before: str, **rules: object) -> Iterator[tuple[int, JoinLine]]:
    """A hub in a process of its own: its pid, and the join line."""
    settings = folder / "settings.json"
    settings.write_text(json.dumps(rules))
    words = [*before, sys.executable, "-m", "isles.outer.hub", str(folder / "state")]
    words += ["--run", "t", "--settings", str(settings)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "is open" in process.stdout.readline()
            yield process.pid, JoinLine.read(folder / "state" / "join")
        finally:
            process.kill()


def ask(
    line: JoinLine, method: str, path: str, body: object = None, *, raw: bytes | None = None
) -> tuple[int, Any]:
    """Send a request as it is; the status and the answer."""
    connection = _Pinned(line, DEADLINE_S)
    headers = {"Authorization": f"Bearer {line.token}"}
    if raw is not None:
        headers["X-Sha256"] = hashlib.sha256(raw).hexdigest()
    data = json.dumps(body).encode() if raw is None and body is not None else raw
    connection.request(method, path, body=data, headers=headers)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found


def member(line: JoinLine, own: str, **more: Any) -> tuple[int, Any]:
    """A cluster of four numbers joins."""
    return ask(line, "POST", "/v1/join", joining(own).model_dump() | more)


def contribute(line: JoinLine, name: str, outer_step: int, value: float, tokens: int = 100) -> int:
    data = struct.pack("<4f", *[value] * 4)
    place = f"/v1/rounds/{outer_step}"
    ask(line, "PUT", f"{place}/parts/{member_id(name)}/0", raw=data)
    body = {"id": member_id(name), "tokens": tokens, "steps": 1, "samples": []}
    body["digest"] = digest_of([hashlib.sha256(data).hexdigest()])
    return ask(line, "POST", f"{place}/complete", body)[0]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def unpacking_s(packed: bytes) -> float:
    before = time.process_time()
    zlib.decompress(packed)
    return time.process_time() - before


def test_strangers_keep_nobody_out_and_are_few(tmp_path):
    """More of each kind than files that the process may have open."""
    limit = ("prlimit", "--nofile=256:256")
    context = ssl._create_unverified_context()
    with hub(tmp_path, *limit) as (pid, line), ExitStack() as stack:

        def tcp() -> socket.socket:
            place = line.host, line.port
            return stack.enter_context(socket.create_connection(place, DEADLINE_S))

        def tls(sent: bytes = b"") -> socket.socket:
            made = stack.enter_context(context.wrap_socket(tcp()))
            made.sendall(sent)
            return made

        async def beat(client: HubApi) -> None:
            await client.heartbeat(Heartbeat(id=client.id, step=1, version=0), DEADLINE_S)

        async def flood() -> None:
            async with HubApi(line, member_id("a")) as client:
                await client.join(joining("a"), DEADLINE_S)
                head = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n"
                body = b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"
                hello = b"\x16\x03\x01\x02\x00"
                for sent in (None, hello, b"", head + b"X-A: ", body, head + b"\r\n"):
                    for _ in range(80):
                        with suppress(OSError):
                            if sent is None or sent is hello:
                                await asyncio.to_thread(lambda s=sent: tcp().sendall(s or b""))
                            else:
                                await asyncio.to_thread(tls, sent)
                    await beat(client)

        asyncio.run(flood())
        # A packed body is unpacked for nobody, with the token or without it.
        bomb = zlib.compress(bytes(1 << 28), 9)
        for token, says in ((b"", b" 401 "), (f"Bearer {line.token}".encode(), b" 415 ")):
            before = cpu_s(pid)
            packed = b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\n"
            packed += b"Authorization: %b\r\nContent-Length: %d\r\n\r\n" % (token, len(bomb))
            for _ in range(8):
                asked = tls(packed + bomb)
                assert says in asked.recv(100)
                asked.close()
            # Unpacked they are 2 GiB, and more than a second of work.
            assert cpu_s(pid) - before < 0.5 * unpacking_s(bomb) * 8
        assert ask(line, "GET", "/v1/status")[0] == 200
        files = Path(f"/proc/{pid}/fd")
        until(lambda: len(list(files.iterdir())) < 64 + 40, "strangers are few")


def test_a_member_cannot_lift_its_limits_nor_break_a_lease(tmp_path):
    with hub(tmp_path, min_clusters=2) as (_, line):
        assert [member(line, name)[0] for name in "ae"] == [200, 200]
        for outer_step in range(6):
            for name in "ae":
                assert contribute(line, name, outer_step, 0.01) == 200
            assert ask(line, "GET", f"/v1/rounds/{outer_step}?wait=30")[1]["state"] == "committed"
        assert contribute(line, "a", 6, 0.01) == contribute(line, "e", 6, 1e14, 2**61) == 200
        told = ask(line, "GET", "/v1/rounds/6?wait=30")[1]
        assert told["weights"] == {"a": 100} and "its norm" in told["refused"]["e"]
        place, own = "/v1/lease", {"id": member_id("a"), "samples": 100}
        assert ask(line, "POST", place, {**own, "number": 1})[1]["samples"] == [[0, 100]]
        spans = [[2 * n, 2 * n + 1] for n in range(99_000)]
        for holding, status in (([[0, 2**62 - 1]], 200), (spans, 422), ([[5, 5]], 422)):
            assert member(line, "e", version=7, holding=holding)[0] == status
        ask(line, "POST", "/v1/leave", {"id": member_id("e"), "has_finished": True})
        assert ask(line, "POST", place, {**own, "number": 2})[1]["samples"] == [[100, 200]]
        beat = {"id": member_id("a"), "step": 1, "version": 0, "phase": "\x1b]0;OWNED\x07"}
        assert ask(line, "POST", "/v1/heartbeat", beat)[0] == 422
        deep = b"[" * 60_000
        assert ask(line, "POST", "/v1/heartbeat", raw=deep)[0] == 422


def test_what_a_member_sent_goes_when_it_leaves(tmp_path):
    with hub(tmp_path, max_clusters=2) as (_, line):
        pieces = [[2**18]]
        member(line, "a", pieces=pieces)
        chunk, rounds = os.urandom(2**20), tmp_path / "state" / "rounds"
        for number in range(6):
            name = f"e{number}"
            assert member(line, name, name="evil", pieces=pieces)[0] == 200
            for outer_step in range(8):
                place = f"/v1/rounds/{outer_step}/parts/{member_id(name)}/0"
                assert ask(line, "PUT", place, raw=chunk)[0] == 200
            ask(line, "POST", "/v1/live", {"id": member_id(name), "record": "A" * 2**18})
            ask(line, "POST", "/v1/leave", {"id": member_id(name), "has_finished": True})
            until(lambda: not list(rounds.rglob("*.part")), "its files go")
        assert len(ask(line, "GET", "/v1/live")[1]["members"]) == 1


def test_what_was_counted_or_completed_is_not_written_again(tmp_path):
    """A slow request of before goes on after its member has left and joined again."""
    context, nan = ssl._create_unverified_context(), struct.pack("<4f", *[float("nan")] * 4)
    with hub(tmp_path, min_clusters=2) as (_, line):
        assert [member(line, name)[0] for name in "ae"] == [200, 200]
        head = f"PUT /v1/rounds/0/parts/{member_id('e')}/0 HTTP/1.1\r\nHost: x\r\n"
        head += f"Authorization: Bearer {line.token}\r\nContent-Length: {len(nan)}\r\n"
        head += f"X-Sha256: {hashlib.sha256(nan).hexdigest()}\r\nExpect: 100-continue\r\n\r\n"
        place = line.host, line.port
        with context.wrap_socket(socket.create_connection(place, DEADLINE_S)) as slow:
            slow.sendall(head.encode())
            assert b" 100 " in slow.recv(100)
            slow.sendall(nan[:3])
            parts = tmp_path / "state" / "rounds"
            until(lambda: list(parts.rglob("*.coming")), "it has begun")
            assert ask(line, "POST", "/v1/leave", {"id": member_id("e")})[0] == 200
            until(lambda: not list(parts.rglob("*.coming")), "its file goes")
            assert member(line, "e")[0] == 200
            assert contribute(line, "e", 0, 1.0) == 200
            slow.sendall(nan[3:])
            assert b" 409 " in slow.recv(100)
        assert contribute(line, "a", 0, 3.0) == 200
        answer = ask(line, "GET", "/v1/rounds/0?wait=20")[1]
        assert answer["state"] == "committed" and set(answer["weights"]) == set("ae")
        average = parts / "00000000" / "average"
        assert average.read_bytes() == struct.pack("<4f", *[2.0] * 4)
        assert ask(line, "GET", "/v1/rounds/0/average/hashes")[0] == 200
        for name in "ae":
            contribute(line, name, 1, float("nan"))
        answer = ask(line, "GET", "/v1/rounds/1?wait=20")[1]
        assert answer["state"] == "committed" and not answer["size_bytes"]
        assert ask(line, "GET", "/v1/rounds/1/average/hashes")[0] == 404
        long = joining("e").model_dump() | {"pieces": [[4] * 2**21]}
        assert ask(line, "POST", "/v1/join", long)[0] == 413


def test_a_state_that_is_not_what_was_announced_reaches_nobody(tmp_path):
    def spoilt(state: Path) -> str:
        # What was announced, but for a momentum that is not finite.
        head, weights = state_head("a", 0, 0, 4, has_momentum=True), bytes(16)
        state.write_bytes(head + weights + struct.pack("<4f", 0.0, math.nan, 0.0, 0.0))
        return hashlib.sha256(hashlib.sha256(weights).digest()).hexdigest()

    async def give(state: Path) -> None:
        async with HubApi(line, member_id("e")) as evil, HubApi(line, member_id("n")) as newcomer:
            await evil.join(joining("e"), DEADLINE_S)
            await newcomer.join(joining("n", outer_params=["1" * 64]), DEADLINE_S)
            with pytest.raises(Exception, match="requested from e"):
                await newcomer.pull_state(tmp_path / "pulled", 0.5)
            with pytest.raises(HubRefusal, match="differ from its announcement"):
                await evil.give_state(0, [ZERO], [state], DEADLINE_S)
            with pytest.raises(Exception, match="no state has arrived"):
                await newcomer.pull_state(tmp_path / "pulled", 0.5)
            digest = spoilt(state)
            with pytest.raises(HubRefusal):
                await evil.give_state(0, [digest], [state], DEADLINE_S)
            with pytest.raises(Exception, match="no state has arrived"):
                await newcomer.pull_state(tmp_path / "pulled", 0.5)

    with hub(tmp_path) as (_, line):
        state = tmp_path / "fragment-0.safetensors"
        state.write_bytes(os.urandom(500))
        asyncio.run(give(state))

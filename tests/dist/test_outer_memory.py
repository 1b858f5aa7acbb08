"""The memory of the hub's process, against members that read nothing and send no end."""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from isles.outer.messages import digest_of
from isles.run.join_line import JoinLine
from isles.run.relay import LONGEST
from tests.deadline import DEADLINE_S, until
from tests.dist.test_outer_member import ask, hub, member
from tests.outer_world import member_id

_CONNECTIONS = 120
_MOST_MIB = 200
"""What all these connections may take: TLS and unread bodies take up to 1 MiB of each."""


def _anonymous_mib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if "RssAnon" in line).split()[1]) // 1024


def _grows_by(pid: int, attack: Callable[[], None]) -> int:
    """How much memory a process has more after an attack, once that stays the same."""
    before = _anonymous_mib(pid)
    attack()
    seen = [before]

    def is_still() -> bool:
        seen.append(_anonymous_mib(pid))
        return len(seen) > 80 and max(seen[-60:]) - min(seen[-60:]) <= 1

    until(is_still, "the memory stays the same")
    return max(seen) - before


@pytest.mark.long
def test_answers_that_nobody_reads_and_bodies_without_end_fill_no_memory(tmp_path):
    found, context = {}, ssl._create_unverified_context()
    with hub(tmp_path, gather=1, max_clusters=80) as (pid, line), ExitStack() as stack:

        def flood(first: str, body: bytes = b"") -> None:
            head = f"{first} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {line.token}\r\n"
            head += f"Range: bytes=0-{2**20 - 1}\r\nContent-Length: {len(body) and 2**22 - 1}\r\n"
            for _ in range(_CONNECTIONS):
                sock = socket.socket()
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.settimeout(DEADLINE_S)
                sock.connect((line.host, line.port))
                made = stack.enter_context(context.wrap_socket(sock))
                made.sendall(head.encode() + b"\r\n")
                made.settimeout(0.2)
                sent = 0
                try:
                    while sent < len(body):
                        sent += made.send(body[sent : sent + 2**16])
                except TimeoutError:
                    pass  # the hub reads no more of it

        _have_an_average(line)
        for number in range(70):
            name = f"e{number}"
            member(line, name, pieces=[[2**20]])
            shown = {"id": member_id(name), "record": "A" * LONGEST}
            assert ask(line, "POST", "/v1/live", shown)[0] == 200
        attacks = {
            "averages": lambda: flood("GET /v1/rounds/0/average"),
            "live": lambda: flood("GET /v1/live"),
            "joins": lambda: flood("POST /v1/join", b"{" + b" " * (2**22 - 3)),
        }
        for name, attack in attacks.items():
            if (grown := _grows_by(pid, attack)) > _MOST_MIB:
                found[name] = grown
            assert ask(line, "GET", "/v1/status")[0] == 200
    assert found == {}, "MiB"


def _have_an_average(line: JoinLine) -> None:
    member(line, "a", pieces=[[2**20]])
    raw = struct.pack("<f", 1.0) * 2**18
    digest = digest_of([hashlib.sha256(raw).hexdigest()] * 4)
    for index in range(4):
        place = f"/v1/rounds/0/parts/{member_id('a')}/{index}"
        assert ask(line, "PUT", place, raw=raw)[0] == 200
    body = {"id": member_id("a"), "tokens": 1, "steps": 1, "samples": [], "digest": digest}
    assert ask(line, "POST", "/v1/rounds/0/complete", body)[0] == 200
    until(
        lambda: ask(line, "GET", "/v1/rounds/0")[1]["state"] == "committed",
        "the average is there",
    )

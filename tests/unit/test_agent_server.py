"""What may come over the line between nodes and their coordinator, and who else may knock there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from isles import __version__
from isles.agent.connection import fetch_run
from isles.agent.protocol import GREETING_BYTES, ProtocolError, Wire, authenticate, proof
from isles.errors import PreflightError, UserError
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.unit.test_agent_coordinator import TOKEN, Table, dial, greet, table


def plain(port: int) -> socket.socket:
    """A connection that says nothing by itself."""
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def knock(made: Table, said: bytes) -> bytes:
    """What an unknown connection is answered, up to the end of the connection."""
    with plain(made.fleet.port) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(DEADLINE_S)
        return connection.makefile("rb").read()


@each(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"hello": null}\n',
        b'{"hello": {"node": 1e999}}\n',
        b'{"hello": "you"}\n',
    ],
)
def test_nonsense_ends_its_own_connection_only(
    tmp_path: Path, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with table(tmp_path) as made:
        assert b"welcome" not in knock(made, said)
        made.begin(0, 1)
    assert "Traceback" not in capfd.readouterr().err


@each(
    ("key", "value"), [("process", {}), ("versions", ["2"]), ("process", "me"), ("node", "first")]
)
def test_a_greeting_that_makes_no_sense_is_no_traceback(
    tmp_path: Path, key: str, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with table(tmp_path) as made:
        wire = Wire(plain(made.fleet.port))
        message = {"hello": {**made.hello(0), "agent": "t", key: value}}
        with pytest.raises(ConnectionResetError):
            authenticate(wire, message, TOKEN, DEADLINE_S)
        made.begin(0, 1)
    assert "Traceback" not in capfd.readouterr().err


def test_a_report_that_is_none_costs_the_connection_and_not_the_run(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        wire = Wire(plain(made.fleet.port))
        greet(wire, made.hello(0))
        wire.send({"report": "well"})
        made.look_until(lambda: made.server.peers()[0].wire is None, "it is cut")
        assert made.server.peers()[0].report == {}


@pytest.mark.long
def test_the_first_word_to_a_node_is_a_welcome(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        is_over = threading.Event()

        def order() -> None:
            while not is_over.is_set():
                made.server.command(0, {"phase": "wait"}, time.monotonic())

        busy = threading.Thread(target=order)
        busy.start()
        try:
            for _ in range(200):
                wire = Wire(plain(made.fleet.port))
                greet(wire, made.hello(0))
                wire.close()
        finally:
            is_over.set()
            busy.join()


@each("said", [b'{"refused": 1}\n', b'{"refused": {"what": "x"}}\n'])
def test_a_refusal_that_makes_no_sense_is_that_of_another_program(
    tmp_path: Path, said: bytes
) -> None:
    def answer() -> None:
        while True:
            try:
                connection, _ = other.accept()
            except OSError:
                return
            connection.sendall(said)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as other, table(tmp_path) as made:
        threading.Thread(target=answer, daemon=True).start()
        connection = dial(other.getsockname()[1], {}, wait_s=0.5)
        made.look_until(lambda: connection.state == "refused", "it is found out")
        assert "is not the coordinator of this run" in str(connection.failure)
        port = other.getsockname()[1]
        with pytest.raises(UserError, match="is not the coordinator of this run"):
            fetch_run(f"127.0.0.1:{port}", TOKEN, 1, None, timeout_s=0.1)


def serve(listener: socket.socket, files: dict[str, Any]) -> None:
    """What a coordinator gives to the first who knows the token."""
    wire = Wire(listener.accept()[0])
    wire.send({"challenge": "c"})
    asked = wire.receive(DEADLINE_S) or {}
    wire.send({"files": files, "proof": proof(TOKEN, asked["challenge"], "coordinator")})


@each("target", ["h0:99999", "h0:0", "h0", "h0:²", "a..b:29500"])
def test_an_address_that_cannot_be_is_no_traceback(target: str) -> None:
    with pytest.raises(UserError, match=r"neither a run directory|no coordinator has answered"):
        fetch_run(target, TOKEN, 1, None, timeout_s=0.1)


def test_a_first_node_with_another_isles_is_named_before_its_files_are_read() -> None:
    def answer() -> None:
        serve(other, {"isles": "0.0.1", "whatever": "it was then"})

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer, daemon=True).start()
        target = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(PreflightError, match=f"has isles 0.0.1, this host has {__version__}"):
            fetch_run(target, TOKEN, 1, None, timeout_s=DEADLINE_S)


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return plain(listener.getsockname()[1]), listener.accept()[0]


def test_a_message_that_trickles_in_has_one_deadline_for_all_its_bytes() -> None:
    here, there = pair()
    is_over = threading.Event()

    def trickle() -> None:
        while not is_over.wait(0.05):
            there.sendall(b"x")

    slow = threading.Thread(target=trickle)
    slow.start()
    try:
        assert Wire(here).receive(0.4) is None  # else it waits as long as letters come
    finally:
        is_over.set()
        slow.join()
        here.close()
        there.close()


def test_a_stranger_gets_no_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with table(tmp_path) as made:
        with plain(made.fleet.port) as unknown, pytest.raises(OSError, match=r"pipe|reset"):
            for _ in range(1024):
                unknown.sendall(b"x" * GREETING_BYTES)
        made.begin(0, 1)
    assert "a line without an end" in capfd.readouterr().err


def test_who_is_known_may_say_more_than_a_stranger(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        wire = Wire(plain(made.fleet.port))
        greet(wire, made.hello(0))
        wire.send({"report": {"state": "idle", "tail": "x" * 4 * GREETING_BYTES}})
        made.look_until(lambda: made.server.peers()[0].report.get("tail"), "it is heard")
        wire.close()
    here, there = pair()
    with here, there:
        there.sendall(json.dumps({"tail": "x" * 2000}).encode() + b"\n")
        with pytest.raises(ProtocolError):
            Wire(here).receive(DEADLINE_S, longest_bytes=1000)


def test_many_who_say_nothing_do_not_keep_a_node_out(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        silent = [plain(made.fleet.port) for _ in range(150)]
        made.begin(0, 1)
        assert threading.active_count() < 120
        for each in silent:
            each.close()


def test_what_a_stranger_says_does_nothing_to_a_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\r2026 coordinator: all is well\n" + "x" * 20_000
    with table(tmp_path) as made:
        for other in ({"run": evil}, {"versions": {"isles": evil, "torch": "2"}}):
            wire = Wire(plain(made.fleet.port))
            message = {"hello": {**made.hello(1), "agent": "t", **other}}
            with pytest.raises(PreflightError) as caught:
                authenticate(wire, message, TOKEN, DEADLINE_S)
            assert "\x1b" not in caught.value.what and len(caught.value.what) < 1000
            wire.close()
        wire = Wire(plain(made.fleet.port))
        with pytest.raises(PreflightError):
            authenticate(wire, {"fetch": evil}, evil, DEADLINE_S)
        wire.close()
    said = capfd.readouterr().err
    assert "\x1b" not in said and "\r" not in said
    assert all("coordinator: " in line[:35] and len(line) < 1000 for line in said.splitlines())


def test_who_knocks_again_and_again_fills_no_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with table(tmp_path) as made:
        for number in range(200):
            wire = Wire(plain(made.fleet.port))
            with pytest.raises(PreflightError):
                authenticate(wire, {"fetch": True}, str(number), DEADLINE_S)
            wire.close()
        assert "does not know the token" in str(made.server.refused)
    assert 5 < len(capfd.readouterr().err.splitlines()) < 60


_FROZEN = """
import os, signal, socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.long
def test_a_first_node_that_is_frozen_at_the_start_is_no_other_program() -> None:
    """Its kernel takes the connection; whether it will ever speak, nobody can know."""
    head = subprocess.Popen([sys.executable, "-c", _FROZEN], stdout=subprocess.PIPE)
    try:
        assert head.stdout is not None
        port = int(head.stdout.readline())
        os.waitid(os.P_PID, head.pid, os.WSTOPPED)
        connection = dial(port, {}, wait_s=1.0)
        end = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while connection.state == "seeking" and time.monotonic() < end:
            pause.wait(0.02)
        assert connection.state == "refused"
        assert "takes the connection, and says nothing" in str(connection.failure)
    finally:
        head.kill()
        head.wait()

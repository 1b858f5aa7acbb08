"""What may come over the line between nodes and their coordinator, and who else may knock there."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from isles import __version__
from isles.agent.connection import fetch_run
from isles.agent.protocol import GREETING_BYTES, Wire, authenticate, proof
from isles.errors import PreflightError, UserError
from tests.agent_table import TOKEN, dial, plain, table
from tests.deadline import DEADLINE_S, until
from tests.each import each
from tests.ports import listening

NONSENSE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xfe\n",
    b"[" * 60_000 + b"\n",  # deeper than Python reads
    b"[" * 70_000 + b"\n",  # longer than GREETING_BYTES
    b'{"hello": null}\n',
    b'{"hello": {"node": 1e999}}\n',
)
ODD_GREETINGS: tuple[dict[str, Any], ...] = (
    {"process": {}},
    {"process": "me"},
    {"versions": ["2"]},
    {"node": "first"},
)


def test_nonsense_ends_its_own_connection_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with table(tmp_path) as made:
        for line in NONSENSE:
            with plain(made.fleet.port) as unknown:
                unknown.sendall(line)
                unknown.shutdown(socket.SHUT_WR)
                assert b"welcome" not in unknown.makefile("rb").read(), line
        for other in ODD_GREETINGS:  # from somebody who knows the token
            with pytest.raises(ConnectionResetError):
                hello = {"hello": {**made.hello(0), **other}}
                authenticate(Wire(plain(made.fleet.port)), hello, TOKEN, DEADLINE_S)
        wire = made.join_silently(0)
        wire.send({"report": "well"})
        made.look_until(lambda: made.server.peers()[0].wire is None, "it is cut")
        assert made.server.peers()[0].report == {}
        made.begin(0, 1)
    assert "Traceback" not in capfd.readouterr().err


def test_an_unknown_connection_gets_no_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with table(tmp_path) as made:
        with plain(made.fleet.port) as unknown, pytest.raises(OSError, match=r"pipe|reset"):
            for _ in range(1024):
                unknown.sendall(b"x" * GREETING_BYTES)
        made.begin(0, 1)
    assert "a line without an end" in capfd.readouterr().err


def test_many_who_send_nothing_do_not_keep_a_node_out(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        before = threading.active_count()
        silent = [plain(made.fleet.port) for _ in range(150)]
        made.begin(0, 1)
        # 64 of them have a thread; those that were closed for these end when they are scheduled.
        made.look_until(lambda: threading.active_count() < before + 80, "few of them are left")
        for connection in silent:
            connection.close()


def test_what_an_unknown_connection_sends_does_nothing_to_a_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\r2026 coordinator: all is well\n" + "x" * 20_000
    with table(tmp_path) as made:

        def refused(message: dict[str, Any], token: str = TOKEN) -> str:
            wire = Wire(plain(made.fleet.port))
            with pytest.raises(PreflightError) as caught:
                authenticate(wire, message, token, DEADLINE_S)
            wire.close()
            return caught.value.what

        for other in ({"run": evil}, {"versions": {"isles": evil, "torch": "2"}}):
            what = refused({"hello": made.hello(1, **other)})
            assert "\x1b" not in what and len(what) < 1000
        for number in range(200):
            refused({"fetch": evil}, f"{number}{evil}")
    log = capfd.readouterr().err
    assert "\x1b" not in log and "\r" not in log
    lines = log.splitlines()
    assert all("coordinator: " in line[:35] and len(line) < 1000 for line in lines)
    assert 5 < len(lines) < 60, "who knocks again and again fills no log"


def test_who_is_known_may_send_more_than_an_unknown_connection(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        wire = made.join_silently(0)
        wire.send({"report": {"state": "idle", "tail": "x" * 4 * GREETING_BYTES}})
        made.look_until(lambda: made.server.peers()[0].report.get("tail"), "it is heard")
        wire.close()


def test_a_message_that_trickles_in_has_one_deadline_for_all_its_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here, there = plain(listener.getsockname()[1]), listener.accept()[0]
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
                made.join_silently(0).close()
        finally:
            is_over.set()
            busy.join()


@each("line", [b"SSH-2.0-other\r\n", b'{"refused": 1}\n', b'{"refused": {"what": "x"}}\n'])
def test_another_program_on_the_port_is_found_out(line: bytes) -> None:
    with listening(lambda connection: connection.sendall(line)) as port:
        connection = dial(port, {}, wait_s=0.5)
        until(lambda: connection.state == "refused", "it is found out")
        assert "is not the coordinator of this run: " in str(connection.failure)
        with pytest.raises(UserError, match="is not the coordinator of this run"):
            fetch_run(f"127.0.0.1:{port}", TOKEN, 1, None, timeout_s=0.1)


@pytest.mark.long
def test_a_first_node_that_is_frozen_at_the_start_is_no_other_program() -> None:
    # The kernel takes the connection; whether anybody will ever speak, nobody can know.
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        connection = dial(frozen.getsockname()[1], {}, wait_s=1.0)
        until(lambda: connection.state == "refused", "it is given up")
        assert "takes the connection, and says nothing" in str(connection.failure)


def test_a_first_node_with_another_isles_is_named_before_its_files_are_read() -> None:
    def serve(connection: socket.socket) -> None:
        wire = Wire(connection)
        wire.send({"challenge": "c"})
        asked = wire.receive(DEADLINE_S) or {}
        files = {"isles": "0.0.1", "whatever": "it was then"}
        wire.send({"files": files, "proof": proof(TOKEN, asked["challenge"], "coordinator")})

    expected = pytest.raises(PreflightError, match=f"isles 0.0.1, this host has {__version__}")
    with listening(serve) as port, expected:
        fetch_run(f"127.0.0.1:{port}", TOKEN, 1, None, timeout_s=DEADLINE_S)


@each("target", ["h0:99999", "h0:0", "h0", "h0:²", "a..b:29500"])
def test_an_address_that_cannot_be_is_no_traceback(target: str) -> None:
    with pytest.raises(UserError, match=r"neither a run directory|no coordinator has answered"):
        fetch_run(target, TOKEN, 1, None, timeout_s=0.1)

"""Whoever else knocks at the coordinator's port: no memory, no time, no say in the log."""

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
from isles.agent.connection import Connection, fetch_run
from isles.agent.protocol import GREETING_BYTES, ProtocolError, Wire, authenticate
from isles.errors import PreflightError
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.unit.test_fleet import TOKEN, greet, table
from tests.unit.test_fleet_line import serve


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return dial(listener.getsockname()[1]), listener.accept()[0]


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
        with dial(made.fleet.port) as unknown, pytest.raises(OSError, match=r"pipe|reset"):
            for _ in range(1024):
                unknown.sendall(b"x" * GREETING_BYTES)
        made.begin(0, 1)
    assert "a line without an end" in capfd.readouterr().err


def test_who_is_known_may_say_more_than_a_stranger(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        wire = Wire(dial(made.fleet.port))
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
        silent = [dial(made.fleet.port) for _ in range(150)]
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
            wire = Wire(dial(made.fleet.port))
            message = {"hello": {**made.hello(1), "agent": "t", **other}}
            with pytest.raises(PreflightError) as caught:
                authenticate(wire, message, TOKEN, DEADLINE_S)
            assert "\x1b" not in caught.value.what and len(caught.value.what) < 1000
            wire.close()
        wire = Wire(dial(made.fleet.port))
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
            wire = Wire(dial(made.fleet.port))
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


def test_a_head_that_is_frozen_at_the_start_is_no_other_program(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its kernel takes the connection; whether it will ever speak, nobody can know."""
    head = subprocess.Popen([sys.executable, "-c", _FROZEN], stdout=subprocess.PIPE)
    try:
        assert head.stdout is not None
        address = "127.0.0.1", int(head.stdout.readline())
        os.waitid(os.P_PID, head.pid, os.WSTOPPED)
        connection = Connection("h0", address, {}, TOKEN, start_timeout_s=1.0, may_return=False)
        end = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while connection.state == "seeking" and time.monotonic() < end:
            pause.wait(0.02)
        assert connection.state == "refused"
        assert "takes the connection, and says nothing" in str(connection.failure)
    finally:
        head.kill()
        head.wait()


@each(
    "other",
    [
        {"run": "../x-1"},
        {"run": "a/b"},
        {"run": "/etc/x"},
        {"run": ".ssh"},
        {"run": ""},
        {"run": "x\n1"},
        {"run": 7},
        {"attempt": "none"},
        {"fleet": {}},
        {"fleet": {"digest": "0" * 64}},
        {"text": None},
    ],
)
def test_files_that_lead_elsewhere_or_are_of_another_run_are_not_written(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    with table(tmp_path / "head") as made, socket.create_server(("127.0.0.1", 0)) as server:
        resolved = made.run_dir.resolved.read_text()
        files = {"isles": __version__, "run": "x-1", "attempt": 1, "resolved": resolved}
        files |= {"text": "", "fleet": made.fleet.record(), "begun_at": 1.0, "born_at": 1.0}
        if "fleet" in other:
            other = {"fleet": {**files["fleet"], **other["fleet"]} if other["fleet"] else {}}

        def answer() -> None:
            serve(server, {**files, **other})

        threading.Thread(target=answer, daemon=True).start()
        target, here = f"127.0.0.1:{server.getsockname()[1]}", tmp_path / "here" / "runs"
        with pytest.raises(PreflightError, match="has sent is no run of isles"):
            fetch_run(target, TOKEN, 1, here, timeout_s=9.0)
        assert not (tmp_path / "here").exists()

"""What may come over the line between the nodes and their coordinator, in whatever order."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from isles import __version__
from isles.agent.connection import fetch_run
from isles.agent.failure import decide
from isles.agent.protocol import Wire, authenticate, proof
from isles.errors import ExitCode, PreflightError, UserError
from isles.run.records import read_record
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.unit.test_fleet import TOKEN, Table, dial, error, greet, table


def knock(made: Table, said: bytes) -> bytes:
    """What an unknown connection is answered, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", made.fleet.port), timeout=DEADLINE_S) as connection:
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


@pytest.mark.parametrize(
    ("key", "value"), [("process", {}), ("versions", ["2"]), ("process", "me"), ("node", "first")]
)
def test_a_greeting_that_makes_no_sense_is_no_traceback(
    tmp_path: Path, key: str, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with table(tmp_path) as made:
        wire = Wire(socket.create_connection(("127.0.0.1", made.fleet.port), timeout=DEADLINE_S))
        message = {"hello": {**made.hello(0), "agent": "t", key: value}}
        with pytest.raises(ConnectionResetError):
            authenticate(wire, message, TOKEN, DEADLINE_S)
        made.begin(0, 1)
    assert "Traceback" not in capfd.readouterr().err


def test_a_report_that_is_none_costs_the_connection_and_not_the_run(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        wire = Wire(socket.create_connection(("127.0.0.1", made.fleet.port), timeout=DEADLINE_S))
        greet(wire, made.hello(0))
        wire.send({"report": "well"})
        made.look_until(lambda: made.server.peers()[0].wire is None, "it is cut")
        assert made.server.peers()[0].report == {}


def test_a_node_may_go_in_the_very_moment_in_which_it_is_told_something(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        made.join(0)
        made.look_until(lambda: made.server.connected() == [0], "one has come")
        peer = made.server.peers()[0]

        class Parting(dict[str, Any]):
            """Compared with what was sent before, as the other thread takes the line away."""

            __hash__ = None  # type: ignore[assignment]  # as that of a dict

            def __eq__(self, other: object) -> bool:
                peer.wire = None
                return False

        made.server.command(0, Parting(phase="wait"), time.monotonic())
        assert peer.wire is None


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
                wire = Wire(
                    socket.create_connection(("127.0.0.1", made.fleet.port), timeout=DEADLINE_S)
                )
                greet(wire, made.hello(0))
                wire.close()
        finally:
            is_over.set()
            busy.join()


@pytest.mark.parametrize("said", [b'{"refused": 1}\n', b'{"refused": {"what": "x"}}\n'])
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
        connection = dial(other.getsockname()[1], {})
        made.look_until(lambda: connection.state == "refused", "it is found out")
        assert "is not the coordinator of this run" in str(connection.failure)
        port = other.getsockname()[1]
        with pytest.raises(UserError, match="has not answered"):
            fetch_run(f"127.0.0.1:{port}", TOKEN, 1, None, timeout_s=0.1)


def serve(listener: socket.socket, files: dict[str, Any]) -> None:
    """What a coordinator gives to the first who knows the token."""
    wire = Wire(listener.accept()[0])
    wire.send({"challenge": "c"})
    asked = wire.receive(DEADLINE_S) or {}
    wire.send({"files": files, "proof": proof(TOKEN, asked["challenge"], "coordinator")})


@each("target", ["h0:99999", "h0:0", "h0", "h0:²", "a..b:29500"])
def test_an_address_that_cannot_be_is_no_traceback(target: str) -> None:
    with pytest.raises(UserError, match=r"neither a run directory|has not answered"):
        fetch_run(target, TOKEN, 1, None, timeout_s=0.1)


def test_a_first_node_with_another_isles_is_named_before_its_files_are_read() -> None:
    def answer() -> None:
        serve(other, {"isles": "0.0.1", "whatever": "it was then"})

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer, daemon=True).start()
        target = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(PreflightError, match=f"has isles 0.0.1, this host has {__version__}"):
            fetch_run(target, TOKEN, 1, None, timeout_s=DEADLINE_S)


def test_ranks_that_all_ended_well_have_finished_whatever_was_asked_late(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        first, second = made.begin(0, 1)
        made.coordinator.ask_to_stop(15)
        for connection in (first, second):
            connection.report({"restart": 0, "state": "succeeded", "codes": {"0": 0}})
        assert made.ends("it is over")["state"] == "finished"


def test_the_first_rank_of_a_script_has_a_port_before_any_agent_has_said_a_word(
    tmp_path: Path,
) -> None:
    with table(tmp_path, addresses="127.0.1.{}") as made:
        made.runs(*(made.join(node) for node in (1, 0)))
        host, port = made.connections[0].command["master"]
        assert host == "127.0.1.0" and port > 0


def test_a_script_elsewhere_that_has_reported_steps_is_started_again(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        made.attempt.last_step.write_text(f"{0:>8} {7:>12}\n")
        root_cause = {**error(1, time.time(), "boom"), "kind": "ScriptFailed", "is_script": True}
        root_cause["will_recur"] = True  # as a host without the head's records sees it
        found = decide(made.run_dir, made.attempt, 0, root_cause, max_restarts=3)
        assert found.decision == "restart" and read_record(made.attempt.outcome) is None
        made.attempt.last_step.unlink()
        found = decide(made.run_dir, made.attempt, 1, root_cause, max_restarts=3)
        assert found.decision == "fail"
        assert (read_record(made.attempt.outcome) or {})["exit_code"] == ExitCode.TRAINING

"""The nodes of a run and their coordinator: real sockets; the ranks' part is played by the test."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from isles.agent.connection import Connection
from isles.agent.coordinator import Coordinator
from isles.agent.protocol import LOST_AFTER_S, LastSeen, ProtocolError, Wire, authenticate
from isles.agent.server import NodeRecords, RendezvousServer
from isles.errors import ExitCode, UserError
from isles.run.nodes import Fleet, FleetNode
from isles.run.outcome import agent_error
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.restarts import list_restarts
from isles.run.stop import StopKind, request_stop
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.runs import bare_run

VERSIONS = {"isles": "1", "torch": "2"}
TOKEN = "a secret of this attempt"


@dataclass
class Table:
    """A coordinator without a process of its own, driven by the test."""

    run_dir: RunDir
    attempt: Attempt
    fleet: Fleet
    server: RendezvousServer
    coordinator: Coordinator
    connections: list[Connection]
    late_s: float = 0.0

    def look_until(self, condition: Callable[[], Any], what: str) -> Any:
        """Go on supervising until something is so."""
        end = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while time.monotonic() < end:
            self.coordinator.look()
            if found := condition():
                return found
            pause.wait(0.01)
        raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}")

    def join(self, node: int, other: dict[str, Any] | None = None) -> Connection:
        """An agent that comes."""
        connection = dial(self.fleet.port, {**self.hello(node), **(other or {})})
        connection.report({"restart": -1, "state": "idle"})
        self.connections.append(connection)
        return connection

    def hello(self, node: int) -> dict[str, Any]:
        """What an agent says first."""
        return {
            "run": self.run_dir.name,
            "attempt": self.attempt.number,
            "digest": self.fleet.digest,
            "node": node,
            "process": ProcessId.of(os.getpid()).record(),
            "versions": VERSIONS,
        }

    def begin(self, *nodes: int) -> list[Connection]:
        """Agents that come, and are told to start their ranks, and do so."""
        connections = [self.join(node) for node in nodes]
        self.runs(*connections)
        return connections

    def runs(self, *connections: Connection) -> None:
        """Their ranks are started as they were told."""
        told = [connection.command for connection in connections]
        self.look_until(
            lambda: all(c.command.get("phase") == "run" for c in connections), f"all run: {told}"
        )
        for connection in connections:
            connection.report({"restart": connection.command["restart"], "state": "running"})

    def ends(self, what: str) -> dict[str, Any]:
        """The outcome, once there is one."""
        self.look_until(lambda: self.coordinator.is_over, what)
        return read_record(self.attempt.outcome) or {}


def dial(port: int, hello: dict[str, Any], wait_s: float = DEADLINE_S) -> Connection:
    """The connection of an agent."""
    address = "127.0.0.1", port
    return Connection("h0", address, hello, TOKEN, start_timeout_s=wait_s, may_return=False)


@contextmanager
def table(
    path: Path,
    num: int = 2,
    least: int | None = None,
    wait_s: float = 60.0,
    addresses: str = "10.0.0.{}",
) -> Iterator[Table]:
    run_dir = bare_run(path / "runs" / "x-1")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    listener = socket.create_server(("127.0.0.1", 0))
    fleet = Fleet(
        launcher="manual",
        nodes=tuple(FleetNode(n, f"h{n}", None, addresses.format(n), n + 1) for n in range(num)),
        port=listener.getsockname()[1],
        min_nodes=least or num,
        device="cpu",
        start_timeout_s=wait_s,
        digest=hashlib.sha256(run_dir.resolved.read_bytes()).hexdigest(),
    )
    made = Table(run_dir, attempt, fleet, None, None, [])  # type: ignore[arg-type]  # just below
    clock = lambda: time.monotonic() + made.late_s  # noqa: E731
    made.server = RendezvousServer(
        listener, fleet, "x-1", 1, VERSIONS, TOKEN, lambda: {"run": "x-1"}, clock
    )
    made.coordinator = Coordinator(
        run_dir, attempt, fleet, made.server, max_restarts=3, save_timeout_s=60.0
    )
    try:
        yield made
    finally:
        for connection in made.connections:
            connection.leave()
        made.server.close()


def greet(wire: Wire, hello: dict[str, Any]) -> None:
    """What an agent without a thread says first."""
    message = {"hello": {**hello, "agent": "t"}}
    assert "welcome" in authenticate(wire, message, TOKEN, DEADLINE_S)


def error(rank: int, at: float, what: str, *, is_communication: bool = False) -> dict[str, Any]:
    code = ExitCode.COMMUNICATION if is_communication else ExitCode.TRAINING
    return {
        "rank": rank,
        "host": f"h{rank}",
        "at": at,
        "what": what,
        "where": "",
        "fix": "",
        "exit_code": int(code),
        "is_communication": is_communication,
    }


def failed(
    restart: int, root_cause: dict[str, Any] | None, *errors: dict[str, Any]
) -> dict[str, Any]:
    report = {"restart": restart, "state": "failed", "codes": {"0": 3}, "errors": list(errors)}
    return {**report, "root_cause": root_cause, "tail": "the end" if root_cause else ""}


def test_ranks_are_in_the_order_of_the_nodes_whatever_order_they_come_in(tmp_path: Path) -> None:
    with table(tmp_path, 3) as made:
        late, middle, first = (made.join(node) for node in (2, 1, 0))
        made.runs(late, middle, first)
        assert [c.command["ranks"] for c in (first, middle, late)] == [[0, 1], [1, 2], [3, 3]]
        assert {c.command["world_size"] for c in (first, middle, late)} == {6}
        assert late.command["master"][0] == "10.0.0.0", "an address, never a name"
        NodeRecords(made.attempt, made.fleet, made.server).write(made.coordinator.places())
        nodes = (read_record(made.attempt.nodes) or {})["nodes"]
        assert [(n["name"], n["state"], n["first_rank"]) for n in nodes] == [
            ("h0", "there", 0),
            ("h1", "there", 1),
            ("h2", "there", 3),
        ]


def test_who_is_missing_is_named_and_ends_the_wait(tmp_path: Path) -> None:
    with table(tmp_path, 3, wait_s=20.0) as made:
        there = made.join(1)
        made.look_until(lambda: made.server.connected() == [1], "one has come")
        made.late_s = 6.0
        made.look_until(lambda: there.command.get("waiting"), "who waits is told for whom")
        line = there.command["waiting"]
        missing = "waiting for node 0 (h0, 10.0.0.0), node 2 (h2, 10.0.0.2): 1 of 3 nodes are there"
        assert line.startswith(missing)
        status = read_record(made.run_dir.status) or {}
        assert (status["phase"], status["detail"]) == ("waiting for nodes", line)
        made.late_s = 21.0
        outcome = made.ends("the wait has an end")
        assert outcome["exit_code"] == ExitCode.COMMUNICATION
        assert "node 2 (h2, 10.0.0.2) did not come within 20 s" in outcome["reason"]
        made.look_until(lambda: there.command.get("phase") == "over", "who is there ends too")


def test_with_a_least_number_the_run_begins_with_fewer(tmp_path: Path) -> None:
    with table(tmp_path, 3, least=2, wait_s=20.0) as made:
        connections = [made.join(0), made.join(2)]
        made.look_until(lambda: made.server.connected() == [0, 2], "two have come")
        assert not connections[0].command.get("ranks")
        made.late_s = 21.0
        made.runs(*connections)
        assert [c.command["ranks"] for c in connections] == [[0, 1], [1, 3]]


@each(
    ("other", "words"),
    [
        ({"digest": "0" * 64}, "another run file"),
        ({"run": "y-7"}, "here meets x-1, start 1, and not y-7"),
        ({"versions": {**VERSIONS, "torch": "3"}}, "node 1 (h1, 10.0.0.1) has torch 3, h0 has 2"),
        ({"node": 5}, "there is no node 5"),
        ({"node": 0}, "node 0 is there already"),
    ],
)
def test_who_does_not_belong_is_refused_on_both_sides(
    tmp_path: Path, other: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with table(tmp_path) as made:
        first = made.join(0)
        made.look_until(lambda: made.server.connected() == [0], "one has come")
        unknown = made.join(1, other)
        made.look_until(lambda: unknown.state == "refused", "the other is refused")
        assert words in str(unknown.failure) and "fix: " in str(unknown.failure)
        assert words in capfd.readouterr().err
        assert first.state == "connected" and not made.coordinator.is_over


def test_another_program_on_the_port_is_found_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, table(tmp_path) as made:
        threading.Thread(target=_talk, args=(other,), daemon=True).start()
        connection = dial(other.getsockname()[1], {}, wait_s=0.5)
        made.look_until(lambda: connection.state == "refused", "it is found out")
        assert "is not the coordinator of this run: not a message: b'SSH-2.0" in str(
            connection.failure
        )


def _talk(other: socket.socket) -> None:
    while True:
        try:
            other.accept()[0].sendall(b"SSH-2.0-other\r\n")
        except OSError:
            return


def test_the_earliest_error_is_the_cause_whatever_the_clocks_say(tmp_path: Path) -> None:
    with table(tmp_path, 3) as made:
        first, last = made.join(0), made.join(2)
        # The clock of node 1 is an hour ahead.
        wire = Wire(socket.create_connection(("127.0.0.1", made.fleet.port), timeout=DEADLINE_S))
        greet(wire, made.hello(1))
        made.runs(first, last)
        now = time.time()
        first.report(failed(0, None, error(0, now, "lost", is_communication=True)))
        last.report(failed(0, error(3, now, "second")))
        cause = error(1, now + 3600.0 - 5.0, "first")
        wire.send({"report": failed(0, cause, cause), "clock": now + 3600.0})
        made.look_until(lambda: list_restarts(made.attempt), "it is judged")
        (restart,) = list_restarts(made.attempt)
        assert restart.root_cause is not None and restart.root_cause["what"] == "first"
        assert "rank 1 on h1 failed: first" in restart.text
        kept = read_record(made.attempt.rank_error(1)) or {}
        assert abs(kept["at"] - (now - 5.0)) < 3.0, "on record by the head's clock"
        assert "the end of this log on h1" in made.attempt.rank_log(1).read_text()
        wire.close()


def test_after_a_loss_all_end_their_ranks_before_any_begins_again(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        first, second = made.begin(0, 1)
        second.report(failed(0, error(1, time.time(), "boom")))
        made.look_until(lambda: first.command["phase"] == "halt", "all are told to end")
        second.report({"restart": 0, "state": "idle"})
        made.look_until(lambda: made.server.peers()[1].report["state"] == "idle", "one has")
        for _ in range(20):
            made.coordinator.look()
        assert second.command["phase"] == "halt", "the first has not ended its ranks yet"
        first.report({"restart": 0, "state": "idle"})
        made.runs(first, second)
        assert first.command["restart"] == 1


def test_an_agent_that_dies_is_missed_within_seconds(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        first = made.join(0)
        # A process of its own, which has nothing but its socket, and loses it.
        wire = Wire(socket.create_connection(("127.0.0.1", made.fleet.port), timeout=DEADLINE_S))
        greet(wire, made.hello(1))
        made.runs(first)
        wire.close()
        outcome = made.ends("the loss ends a run of a fixed number of nodes")
        assert "node 1 (h1, 10.0.0.1) is lost: its agent has ended without a word" in str(
            outcome["error"]["what"]
        )
        assert outcome["exit_code"] == ExitCode.COMMUNICATION


def test_a_node_that_falls_silent_is_named_after_twenty_seconds(tmp_path: Path) -> None:
    """Switched off, or cut off: its connection is there, and nothing comes."""
    with table(tmp_path) as made:
        first = made.join(0)
        wire = Wire(socket.create_connection(("127.0.0.1", made.fleet.port), timeout=DEADLINE_S))
        greet(wire, made.hello(1))
        made.runs(first)
        peers = made.server.peers()
        while not peers[1].lost:
            made.late_s += 1.0
            peers[0].last_seen.reset()  # this one gives a sign of life each second
            made.coordinator.look()
        assert re.fullmatch(r"it has not been heard of for 2[0-3] s", peers[1].lost)
        outcome = made.ends("the loss ends a run of a fixed number of nodes")
        assert "node 1 (h1, 10.0.0.1) is lost: " + peers[1].lost == outcome["error"]["what"]
        wire.close()


@each(("kind", "code"), [("save", 85), ("interrupt", 130), ("now", 130)])
def test_a_stop_request_is_heard_while_nobody_is_there(
    tmp_path: Path, kind: StopKind, code: int
) -> None:
    with table(tmp_path) as made:
        only = made.join(0)
        made.look_until(lambda: made.server.connected() == [0], "one has come")
        request_stop(made.attempt, kind)
        outcome = made.ends("it is stopped")
        assert (outcome["state"], outcome["exit_code"]) == ("stopped", code)
        made.look_until(lambda: only.command.get("phase") == "over", "who is there ends")
        assert only.command["exit_code"] == code


def test_a_stop_request_of_one_node_is_for_all_and_now_does_not_wait(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        first, second = made.begin(0, 1)
        second.report({"restart": 0, "state": "running", "stop": 2})
        made.look_until(lambda: first.command.get("signal") == 2, "the other hears of it")
        request_stop(made.attempt, "now")
        made.look_until(
            lambda: first.command["phase"] == "over" and first.command["now"], "at once"
        )
        outcome = made.ends("it is over")
        made.look_until(lambda: second.command["phase"] == "over", "the other hears of it too")
        assert outcome["state"] == "stopped"


def test_a_run_directory_that_is_deleted_ends_all_nodes_at_once(tmp_path: Path) -> None:
    with table(tmp_path) as made:
        connections = made.begin(0, 1)
        shutil.rmtree(made.run_dir.path)
        made.look_until(
            lambda: all(c.command.get("phase") == "over" for c in connections), "all are told"
        )
        for connection in connections:
            assert (
                connection.command["now"] and connection.command["exit_code"] == ExitCode.TRAINING
            )
            assert f"{made.run_dir.path} is not there any more" in connection.command["reason"]
        assert not made.run_dir.path.exists()


def test_who_does_not_know_the_token_gets_nothing_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither the files nor a place; and an agent takes nobody else for the coordinator."""
    with table(tmp_path) as made:

        def first_word(message: dict[str, Any], token: str) -> Any:
            wire = Wire(
                socket.create_connection(("127.0.0.1", made.fleet.port), timeout=DEADLINE_S)
            )
            try:
                return authenticate(wire, message, token, DEADLINE_S)
            finally:
                wire.close()

        assert first_word({"fetch": True}, TOKEN)["files"] == {"run": "x-1"}
        hello = {"hello": {**made.hello(1), "agent": "t"}}
        for message in ({"fetch": True}, hello):
            with pytest.raises(UserError, match=r"127\.0\.0\.1 does not know the token"):
                first_word(message, "another secret")
        assert not made.server.peers()
        assert "does not know the token" in capfd.readouterr().err


def test_a_coordinator_that_does_not_know_the_token_is_obeyed_by_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            wire = Wire(server.accept()[0])
            wire.send({"challenge": "c"})
            wire.receive(DEADLINE_S)
            wire.send({"welcome": {}, "proof": "0" * 64})

        threading.Thread(target=pretend, daemon=True).start()
        wire = Wire(socket.create_connection(server.getsockname(), timeout=DEADLINE_S))
        with pytest.raises(ProtocolError, match="does not know the token"):
            authenticate(wire, {"hello": {}}, TOKEN, DEADLINE_S)
        wire.close()


def test_a_process_that_was_frozen_does_not_take_the_others_for_lost() -> None:
    last_seen = LastSeen(0.0)
    assert last_seen.look(1.0) == 1.0
    assert last_seen.look(3601.0) < LOST_AFTER_S, "an hour of its own sleep"
    for second in range(30):
        last_seen.look(3602.0 + second)
    assert last_seen.seconds > LOST_AFTER_S
    last_seen.reset()
    assert last_seen.look(3632.0) < 2.0


@each("is_full", [False, True])
def test_an_outcome_that_cannot_be_recorded_still_has_its_code_and_cause(
    tmp_path: Path, is_full: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with table(tmp_path) as made:
        (only,) = [made.join(0)]
        made.look_until(lambda: made.server.connected() == [0], "one has come")
        if is_full:  # as if: a folder stands where the file would be renamed to
            (made.attempt.outcome / "x").mkdir(parents=True)
        first = agent_error("the switch burns", "call somebody", ExitCode.PREFLIGHT, id="machine")
        made.coordinator.fail(first)
        made.coordinator.fail(agent_error("and so does the house", "run", id="machine"))
        made.look_until(lambda: only.command.get("phase") == "over", "who is there ends")
        assert only.command["exit_code"] == ExitCode.PREFLIGHT
        assert only.command["reason"] == "the switch burns"
        assert made.attempt.outcome.is_file() != is_full
    assert ("could not be put on record" in capfd.readouterr().err) == is_full


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

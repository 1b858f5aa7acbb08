"""Nodes and their coordinator over real sockets: the ranks' part, and strangers, are played."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from isles import __version__
from isles.agent.connection import fetch_run
from isles.agent.protocol import GREETING_BYTES, LOST_AFTER_S, LastSeen, ProtocolError, Wire, proof
from isles.agent.server import NodeRecords
from isles.errors import ExitCode, PreflightError, UserError
from isles.run.outcome import agent_error
from isles.run.records import read_record
from isles.run.restarts import list_restarts
from isles.run.stop import StopKind, request_stop
from tests.agent_table import TOKEN, VERSIONS, Table, ask, dial, error_of, plain, table
from tests.deadline import DEADLINE_S, until
from tests.each import each
from tests.ports import listening


def failed(root_cause: dict[str, Any] | None, *errors: dict[str, Any]) -> dict[str, Any]:
    """The report of a node whose ranks have failed."""
    report = {"restart": 0, "state": "failed", "codes": {"0": 3}, "errors": list(errors)}
    return {**report, "root_cause": root_cause, "tail": "the end" if root_cause else ""}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Table]:
    """Of two nodes."""
    with table(tmp_path) as made:
        yield made


def test_ranks_are_in_the_order_of_the_nodes_whatever_order_they_come_in(tmp_path: Path) -> None:
    with table(tmp_path, 3, addresses="127.0.1.{}") as made:
        late, middle, first = made.begin(2, 1, 0)
        assert [c.command["ranks"] for c in (first, middle, late)] == [[0, 1], [1, 2], [3, 3]]
        assert {c.command["world_size"] for c in (first, middle, late)} == {6}
        host, port = late.command["master"]
        assert host == "127.0.1.0" and port > 0, "an address, never a name, and before it reports"
        NodeRecords(made.attempt, made.fleet, made.server).write(made.coordinator.places())
        nodes = (read_record(made.attempt.nodes) or {})["nodes"]
        found = [(node["name"], node["state"], node["first_rank"]) for node in nodes]
        assert found == [("h0", "there", 0), ("h1", "there", 1), ("h2", "there", 3)]


def test_who_is_missing_is_named_and_ends_the_wait(tmp_path: Path) -> None:
    with table(tmp_path, 3) as made:
        there = made.join(1)
        made.look_until(lambda: made.server.connected() == [1], "one has come")
        made.clock.late_s = 6.0
        made.look_until(lambda: there.command.get("waiting"), "who waits is told for whom")
        line = there.command["waiting"]
        missing = (
            "waiting for node 0 (h0, 10.0.0.0), node 2 (h2, 10.0.0.2): 1 of 3 nodes have joined"
        )
        assert line.startswith(missing)
        status = read_record(made.run_dir.status) or {}
        assert (status["phase"], status["detail"]) == ("waiting for nodes", line)
        made.clock.late_s = 21.0
        outcome = made.end(there)
        assert outcome["exit_code"] == ExitCode.COMMUNICATION
        assert "node 2 (h2, 10.0.0.2) did not join within 20 s" in outcome["reason"]


def test_with_a_least_number_the_run_begins_with_fewer(tmp_path: Path) -> None:
    with table(tmp_path, 3, least=2) as made:
        connections = [made.join(0), made.join(2)]
        made.look_until(lambda: made.server.connected() == [0, 2], "two have come")
        assert not connections[0].command.get("ranks")
        made.clock.late_s = 21.0
        made.run(*connections)
        assert [c.command["ranks"] for c in connections] == [[0, 1], [1, 3]]


OTHERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"digest": "0" * 64}, "the run file differs"),
    ({"run": "y-7"}, "this coordinator runs x-1, attempt 1, not y-7"),
    ({"versions": {**VERSIONS, "torch": "3"}}, "node 1 (h1, 10.0.0.1) has torch 3, h0 has 2"),
    ({"node": 5}, "node 5 does not exist"),
    ({"node": 0}, "node 0 is connected already"),
)


def test_who_does_not_belong_is_refused_on_both_sides(made: Table, capfd) -> None:
    first = made.join(0)
    made.look_until(lambda: made.server.connected() == [0], "one has come")

    def refused(node: int = 1, **other: Any) -> str:
        unknown = made.join(node, **other)
        made.look_until(lambda: unknown.state == "refused", "the other is refused")
        return str(unknown.failure)

    for other, words in OTHERS:
        text = refused(**other)
        assert words in text and "fix: " in text and words in capfd.readouterr().err
    assert first.state == "connected" and not made.coordinator.is_over


def test_who_does_not_know_the_token_gets_nothing_and_fills_no_log(tmp_path, capfd) -> None:
    evil = "\x1b[2J\r2026 coordinator: all is well\n" + "x" * 20_000
    with table(tmp_path) as made:

        def refused(message: dict[str, Any], token: str = TOKEN) -> str:
            with pytest.raises(PreflightError) as caught:
                ask(made.fleet.port, message, token)
            return caught.value.what

        assert ask(made.fleet.port, {"fetch": True})[1]["files"] == {"run": "x-1"}
        for other in ({"run": evil}, {"versions": {"isles": evil, "torch": "2"}}):
            what = refused({"hello": made.hello(1, **other)})
            assert "\x1b" not in what and len(what) < 1000
        nameless = "127.0.0.1 does not know the token"
        assert nameless in refused({"hello": made.hello(1)}, "another secret")
        for number in range(200):
            assert nameless in refused({"fetch": evil}, f"{number}{evil}")
        assert not made.server.peers()
    log = capfd.readouterr().err
    assert nameless in log and "\x1b" not in log and "\r" not in log
    lines = log.splitlines()
    assert all("coordinator: " in line[:35] and len(line) < 1000 for line in lines)
    assert 5 < len(lines) < 60, "who knocks again and again fills no log"


def first_node(answer: Callable[[str], dict[str, Any]]) -> AbstractContextManager[int]:
    """The port of a coordinator that is played; `answer`: its own, to the agent's challenge."""

    def talk(connection: socket.socket) -> None:
        wire = Wire(connection)
        wire.send({"challenge": "c"})
        wire.send(answer((wire.receive(DEADLINE_S) or {})["challenge"]))

    return listening(talk)


def test_a_coordinator_that_does_not_know_the_token_is_obeyed_by_nobody() -> None:
    unknown = pytest.raises(ProtocolError, match="does not know the token")
    with first_node(lambda _: {"welcome": {}, "proof": "0" * 64}) as port, unknown:
        ask(port, {"hello": {}})


def test_a_first_node_with_another_isles_is_named_before_its_files_are_read() -> None:
    def answer(challenge: str) -> dict[str, Any]:
        files = {"isles": "0.0.1", "whatever": "it was then"}
        return {"files": files, "proof": proof(TOKEN, challenge, "coordinator")}

    expected = pytest.raises(PreflightError, match=f"isles 0.0.1, this host has {__version__}")
    with first_node(answer) as port, expected:
        fetch_run(f"127.0.0.1:{port}", TOKEN, 1, None, timeout_s=DEADLINE_S)


def test_the_earliest_error_is_the_cause_whatever_the_clocks_show(tmp_path: Path) -> None:
    with table(tmp_path, 3) as made:
        first, last = made.join(0), made.join(2)
        wire = made.join_silently(1)
        made.run(first, last)
        now = time.time()
        first.report(failed(None, error_of(0, now, "lost", is_communication=True)))
        last.report(failed(error_of(3, now, "second")))
        cause = error_of(1, now + 3600.0 - 5.0, "first")
        wire.send({"report": failed(cause, cause), "clock": now + 3600.0})  # an hour ahead
        made.look_until(lambda: list_restarts(made.attempt), "it is judged")
        (restart,) = list_restarts(made.attempt)
        assert restart.root_cause is not None and restart.root_cause["what"] == "first"
        assert "rank 1 on h1 failed: first" in restart.text
        kept = read_record(made.attempt.rank_error(1)) or {}
        assert abs(kept["at"] - (now - 5.0)) < 3.0, "on record by the coordinator's clock"
        assert "the end of this log on h1" in made.attempt.rank_log(1).read_text()


def test_after_a_loss_all_end_their_ranks_before_any_begins_again(made: Table) -> None:
    first, second = made.begin(0, 1)
    second.report(failed(error_of(1, time.time(), "boom")))
    made.look_until(lambda: first.command["phase"] == "halt", "all are told to end")
    second.report({"restart": 0, "state": "idle"})
    made.look_until(lambda: made.server.peers()[1].report["state"] == "idle", "one has")
    for _ in range(20):
        made.coordinator.look()
    assert second.command["phase"] == "halt", "the first has not ended its ranks yet"
    first.report({"restart": 0, "state": "idle"})
    made.run(first, second)
    assert first.command["restart"] == 1


@each(
    (True, "its agent exited without notice"),
    (False, "no message from it for 2[0-3] s"),  # switched off, or cut off
)
def test_an_agent_that_dies_or_falls_silent_is_named(is_dead: bool, why: str, *, tmp_path):
    with table(tmp_path) as made:
        first = made.join(0)
        wire = made.join_silently(1)
        made.run(first)
        peers = made.server.peers()
        if is_dead:
            wire.close()
            made.look_until(lambda: peers[1].wire is None, "its process has lost its socket")
        begun_s = made.clock.late_s
        while not peers[1].lost:
            made.clock.late_s += 1.0
            peers[0].last_seen.reset()  # this one gives a sign of life each second
            made.coordinator.look()
        assert not is_dead or made.clock.late_s - begun_s < 10.0
        outcome = made.end()  # the number of nodes is fixed
        what = re.escape("node 1 (h1, 10.0.0.1) is lost: ") + why
        assert re.fullmatch(what, outcome["error"]["what"])
        assert outcome["exit_code"] == ExitCode.COMMUNICATION


def test_a_process_that_was_frozen_does_not_take_the_others_for_lost() -> None:
    last_seen = LastSeen(0.0)
    assert last_seen.look(1.0) == 1.0
    assert last_seen.look(3601.0) < LOST_AFTER_S, "an hour of its own sleep"
    for second in range(30):
        last_seen.look(3602.0 + second)
    assert last_seen.seconds > LOST_AFTER_S
    last_seen.reset()
    assert last_seen.look(3632.0) < 2.0


@each(("save", 85), ("interrupt", 130), ("now", 130))
def test_a_stop_request_is_heard_while_nobody_is_there(kind: StopKind, code: int, *, tmp_path):
    with table(tmp_path) as made:
        only = made.join(0)
        made.look_until(lambda: made.server.connected() == [0], "one has come")
        request_stop(made.attempt, kind)
        outcome = made.end(only)
        assert (outcome["state"], outcome["exit_code"]) == ("stopped", code)
        assert only.command["exit_code"] == code


def test_a_stop_request_of_one_node_is_for_all_and_now_does_not_wait(made: Table) -> None:
    first, second = made.begin(0, 1)
    second.report({"restart": 0, "state": "running", "stop": 2})
    made.look_until(lambda: first.command.get("signal") == 2, "the other hears of it")
    request_stop(made.attempt, "now")
    assert made.end(first, second)["state"] == "stopped"
    assert first.command["now"] and second.command["now"]


def test_ranks_that_all_ended_well_have_finished_whatever_was_asked_late(made: Table) -> None:
    connections = made.begin(0, 1)
    made.coordinator.ask_to_stop(15)
    for connection in connections:
        connection.report({"restart": 0, "state": "succeeded", "codes": {"0": 0}})
    assert made.end()["state"] == "finished"


def test_an_outcome_that_cannot_be_recorded_still_has_its_code_and_cause(tmp_path, capfd):
    with table(tmp_path) as made:
        only = made.join(0)
        made.look_until(lambda: made.server.connected() == [0], "one has come")
        # As on a full disk: a folder stands where the file would be renamed to.
        (made.attempt.outcome / "x").mkdir(parents=True)
        first = agent_error("the switch burns", "call somebody", ExitCode.PREFLIGHT, id="machine")
        made.coordinator.fail(first)
        made.coordinator.fail(agent_error("and so does the house", "run", id="machine"))
        made.look_until(lambda: only.command.get("phase") == "over", "the node ends")
        assert only.command["exit_code"] == ExitCode.PREFLIGHT
        assert only.command["reason"] == "the switch burns"
        assert not made.attempt.outcome.is_file()
    assert "this could not be recorded" in capfd.readouterr().err


NONSENSE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xfe\n",
    b"[" * 60_000 + b"\n",  # deeper than Python reads
    b"[" * 70_000 + b"\n",  # longer than GREETING_BYTES
    b'{"hello": null}\n',
    b'{"hello": {"node": 1e999}}\n',
)
ODD_GREETINGS = ({"process": {}}, {"process": "me"}, {"versions": ["2"]}, {"node": "first"})


def test_nonsense_ends_its_own_connection_only(tmp_path, capfd) -> None:
    with table(tmp_path) as made:
        with plain(made.fleet.port) as unknown, pytest.raises(OSError, match=r"pipe|reset"):
            for _ in range(1024):  # it gets no memory
                unknown.sendall(b"x" * GREETING_BYTES)
        assert "a line without a line break" in capfd.readouterr().err
        for line in NONSENSE:
            with plain(made.fleet.port) as unknown:
                unknown.sendall(line)
                unknown.shutdown(socket.SHUT_WR)
                assert b"welcome" not in unknown.makefile("rb").read(), line
        for other in ODD_GREETINGS:  # from somebody who knows the token
            with pytest.raises(ConnectionResetError):
                ask(made.fleet.port, {"hello": {**made.hello(0), **other}})
        wire, peers = made.join_silently(0), made.server.peers()
        # Who is known may send more than an unknown connection, and is cut off for nonsense too.
        wire.send({"report": {"tail": "x" * 4 * GREETING_BYTES}})
        made.look_until(lambda: peers[0].report.get("tail"), "it is heard")
        wire.send({"report": "well"})
        made.look_until(lambda: peers[0].wire is None, "it is cut")
        assert list(peers[0].report) == ["tail"]
        made.begin(0, 1)
    assert "Traceback" not in capfd.readouterr().err


def test_many_who_send_nothing_do_not_keep_a_node_out(made: Table) -> None:
    before = threading.active_count()
    silent = [plain(made.fleet.port) for _ in range(150)]
    made.begin(0, 1)
    # 64 of them have a thread; those that were closed for these end when they are scheduled.
    made.look_until(lambda: threading.active_count() < before + 80, "few of them are left")
    for connection in silent:
        connection.close()


def test_a_message_that_trickles_in_has_one_deadline_for_all_its_bytes() -> None:
    def trickle(connection: socket.socket) -> None:
        while not threading.Event().wait(0.05):
            connection.sendall(b"x")

    with listening(trickle) as port, plain(port) as here:
        assert Wire(here).receive(0.4) is None  # else it waits as long as letters come


@pytest.mark.long
def test_the_first_word_to_a_node_is_a_welcome(made: Table) -> None:
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


@each(b"SSH-2.0-other\r\n", b'{"refused": 1}\n', b'{"refused": {"what": "x"}}\n')
def test_another_program_on_the_port_is_found_out(line: bytes) -> None:
    with listening(lambda connection: connection.sendall(line)) as port:
        connection = dial(port, {}, wait_s=0.5)
        until(lambda: connection.state == "refused", "it is found out")
        assert "not the coordinator of this run (" in str(connection.failure)
        with pytest.raises(UserError, match="not the coordinator of this run"):
            fetch_run(f"127.0.0.1:{port}", TOKEN, 1, None, timeout_s=0.1)


@pytest.mark.long
def test_a_first_node_that_is_frozen_at_the_start_is_no_other_program() -> None:
    # The kernel takes the connection; whether anybody will ever speak, nobody can know.
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        connection = dial(frozen.getsockname()[1], {}, wait_s=1.0)
        until(lambda: connection.state == "refused", "it is given up")
        assert "accepts the connection but sends nothing" in str(connection.failure)


@each("h0:99999", "h0:0", "h0", "h0:²", "a..b:29500")
def test_an_address_that_cannot_be_is_no_traceback(target: str) -> None:
    with pytest.raises(UserError, match=r"neither a run directory|did not answer within"):
        fetch_run(target, TOKEN, 1, None, timeout_s=0.1)

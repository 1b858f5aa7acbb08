"""Runs of queues, of several nodes and of other machines: by their records alone."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isles.agent.agent import NodeLog, Signals
from isles.errors import UserError
from isles.launch.remote.login import remote_script
from isles.monitor import stream
from isles.monitor.logs import LogChoice, log_lines
from isles.monitor.status import RunReport, collect
from isles.monitor.stop import stop_run
from isles.monitor.stream import shown_lines
from isles.monitor.table import report_lines
from isles.run.begin import new_attempt, write_launch
from isles.run.find import find_any, remote_runs, typed_name
from isles.run.nodes import Fleet, FleetNode, read_fleet
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record, write_record
from isles.run.remote import RemoteRun, forget_remote, list_remotes, write_remote
from isles.run.state import FRESH_S, attempt_state
from isles.run.stop import read_stop_request, request_stop
from isles.train.record import Recorder
from isles.train.stop import NOW, StopBeforeTraining, StopSignals
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.runs import bare_run

FAR = ProcessId("elsewhere", 1, 1.0)


def job_run(path: Path, job: dict[str, Any] | None, **outcome: Any) -> tuple[RunDir, Attempt]:
    """A run of a queue that was submitted an hour ago."""
    run_dir = bare_run(path)
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    write_record(attempt.launch, {"launcher": "slurm", "begun_at": time.time() - 3600})
    if job is not None:
        write_record(attempt.job, {"at": time.time(), "reason": "", **job})
    if outcome:
        write_record(attempt.outcome, {"at": time.time() - 60, **outcome})
    return run_dir, attempt


def remote(name: str, host: str, started_at: float = 1.0, path: str = "") -> RemoteRun:
    """A run of another machine."""
    where = path or f"/far/runs/{name}"
    return RemoteRun(name, f"me@{host}", where, (), "python3", "ssh", (f"me@{host}",), started_at)


@each(
    ("job", "outcome", "state", "is_alive"),
    [
        ("pending", None, "queued", True),
        ("requeued", {"state": "stopped", "exit_code": 85}, "queued", True),
        ("running", None, "running", True),
        ("running", {"state": "finished", "exit_code": 0}, "finished", True),
        ("ended", {"state": "finished", "exit_code": 0}, "finished", False),
        ("ended", None, "killed", False),
        ("unknown", None, "unknown", False),
        (None, {"state": "failed", "exit_code": 3}, "failed", False),
    ],
)
def test_a_job_stands_as_its_queue_says(
    tmp_path: Path, job: str | None, outcome: dict[str, Any] | None, state: str, is_alive: bool
) -> None:
    record = {"state": job, "reason": "why"} if job else None
    run_dir, attempt = job_run(tmp_path / "a-1", record, **(outcome or {}))
    found = attempt_state(run_dir, attempt)
    assert (found.state, found.is_alive, found.reason) == (state, is_alive, "why" if job else "")


def test_a_sign_of_life_is_newer_than_the_queues_word(tmp_path: Path) -> None:
    run_dir, attempt = job_run(tmp_path / "a-1", {"state": "pending"}, state="stopped")
    write_record(run_dir.status, {"updated_at": time.time()})
    assert attempt_state(run_dir, attempt).state == "running"
    later = attempt_state(run_dir, attempt, lambda: time.time() + FRESH_S + 1)
    assert later.state == "queued"


def test_rank_0_gives_signs_of_life_without_progress(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    recorder = Recorder(run_dir, is_main=True, world_size=1, heartbeat_s=0.02)
    recorder.phase("preparing data")
    first = read_record(run_dir.status)
    deadline = time.monotonic() + DEADLINE_S
    while (status := read_record(run_dir.status)) == first:
        os.sched_yield()
        assert time.monotonic() < deadline
    assert first is not None
    assert status is not None
    assert status["updated_at"] > first["updated_at"]
    assert status["progress_at"] == first["progress_at"]
    recorder.close()


def test_a_run_that_is_seen_by_its_files_only_is_stopped_by_them(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    attempt = new_attempt(run_dir)
    write_launch(attempt, FAR, world_size=4, device="cuda", command=())
    write_record(run_dir.status, {"phase": "training", "updated_at": time.time()})
    said: list[str] = []

    def rank_0() -> None:
        while not attempt.stop_request.exists():
            os.sched_yield()
        outcome = {"state": "stopped", "exit_code": 85, "step": 5, "at": time.time()}
        write_record(attempt.outcome, outcome)

    thread = threading.Thread(target=rank_0)
    thread.start()
    assert stop_run(run_dir, now=False, timeout_s=DEADLINE_S, print_line=said.append) == 0
    thread.join()
    request = read_stop_request(attempt)
    assert request is not None
    assert request.kind == "save"
    assert "elsewhere" in said[0]
    assert "has ended: stopped at step 5" in said[-1]


def test_a_silent_run_keeps_the_request_and_says_when_it_was_heard(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    attempt = new_attempt(run_dir, now=lambda: time.time() - 600)
    write_launch(attempt, FAR, world_size=4, device="cuda", command=())
    assert "last seen 10m" in collect(run_dir).hint
    with pytest.raises(UserError, match="has not been heard of for 10m"):
        stop_run(run_dir, now=False, timeout_s=1.0, print_line=print)
    assert attempt.stop_request.exists()


@each(("kind", "code"), [("save", 85), ("interrupt", 130)])
def test_a_request_before_the_first_step_ends_a_rank(tmp_path: Path, kind: Any, code: int) -> None:
    attempt = new_attempt(bare_run(tmp_path / "a-1"))
    signals = StopSignals(attempt)
    try:
        request_stop(attempt, kind)
        with pytest.raises(StopBeforeTraining) as caught:
            threading.Event().wait(DEADLINE_S)
        assert caught.value.code == code
        assert signals.was_requested
    finally:
        signals.restore()


def test_a_request_while_training_waits_for_the_steps_end(tmp_path: Path) -> None:
    attempt = new_attempt(bare_run(tmp_path / "a-1"))
    signals = StopSignals(attempt)
    signals.training_begins()
    try:
        assert signals.stop_code == 0
        request_stop(attempt, "save")
        _until(lambda: signals.stop_code == 85)
        request_stop(attempt, "now")
        _until(lambda: signals.stop_code == NOW)
    finally:
        signals.restore()


def _until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        os.sched_yield()
        assert time.monotonic() < deadline


def test_runs_of_other_machines_are_found_by_name(tmp_path: Path) -> None:
    bare_run(tmp_path / "a-1")
    for run in (remote("a-1", "x"), remote("b-1", "x"), remote("b-1", "y", 9e9)):
        write_remote(tmp_path, run)
    assert find_any("a-1@x", tmp_path) == remote("a-1", "x")
    assert find_any("b-1@y", tmp_path) == remote("b-1", "y", 9e9)
    assert find_any("b@x", tmp_path) == remote("b-1", "x")
    assert find_any("b", tmp_path) == remote("b-1", "y", 9e9), "the newest of this name"
    assert find_any(None, tmp_path) == remote("b-1", "y", 9e9)
    assert find_any("a", tmp_path) == RunDir(tmp_path / "a-1"), "newer than the one on x"
    with pytest.raises(UserError, match="may mean 2 runs") as caught:
        find_any("a-1", tmp_path)
    assert str(tmp_path / "a-1") in caught.value.fix
    assert "a-1@x" in caught.value.fix
    with pytest.raises(UserError, match="no run 'c'") as caught:
        find_any("c", tmp_path)
    assert "b-1@y" in caught.value.fix


def test_runs_that_are_called_the_same_are_kept_apart(tmp_path: Path) -> None:
    """Two users of one host, each with a run of this name in a home of their own."""
    homes = [f"/home/{user}/runs/b-1" for user in ("ann", "bob")]
    ann, bob = (remote("b-1", "x", path=path) for path in homes)
    write_remote(tmp_path, replace(ann, ssh="ann@x"))
    write_remote(tmp_path, bob)
    assert {run.path for run in list_remotes(tmp_path)} == {ann.path, bob.path}
    with pytest.raises(UserError, match="b-1@x may mean 2 runs") as caught:
        find_any("b-1@x", tmp_path)
    assert f"ann@x:{ann.path}" in caught.value.fix
    assert bob.place in caught.value.fix
    assert find_any(bob.place, tmp_path) == bob
    assert find_any("b-1@ann@x", tmp_path) == replace(ann, ssh="ann@x")
    forget_remote(tmp_path, ann)
    assert list_remotes(tmp_path) == [bob]


def test_what_is_to_be_typed_says_where_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here, there = bare_run(tmp_path / "runs" / "a-1"), bare_run(tmp_path / "out" / "a-1")
    assert (typed_name(here), typed_name(there)) == ("a-1", str(there.path))
    assert write_remote(Path("runs"), remote("b-1", "x")).typed == "b-1@x"
    far = write_remote(Path("my out"), remote("b-1", "x"))
    assert far.typed == "b-1@x --output-dir 'my out'"
    # What isles says on x is shown here, by the name that it has here.
    assert "export ISLES_NAMED='@x --output-dir '\"'\"'my out'\"'\"''" in remote_script(far, [])
    monkeypatch.setenv("ISLES_NAMED", far.behind)
    assert typed_name(there) == "a-1@x --output-dir 'my out'"


def test_a_clock_that_is_ahead_keeps_no_run_alive(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    ahead_s = 3600.0
    attempt = new_attempt(run_dir, now=lambda: time.time() + ahead_s)
    write_launch(attempt, FAR, world_size=1, device="cpu", command=())
    write_record(run_dir.status, {"updated_at": time.time() + ahead_s})
    now = time.time()
    state = attempt_state(run_dir, attempt, lambda: now)
    assert state.state == "running"
    assert state.last_seen_at is not None and abs(state.last_seen_at - now) < 5
    assert attempt_state(run_dir, attempt, lambda: now + FRESH_S + 5).state == "unknown"


def test_a_fleet_of_another_version_hinders_only_what_needs_it(tmp_path: Path) -> None:
    run_dir, attempt = fleet_run(tmp_path / "a-1")
    record = read_record(attempt.fleet) or {}
    write_record(attempt.fleet, {**record, "colour": "blue"})
    assert read_fleet(attempt) == Fleet.of(record), "a key more is no reason"
    del record["port"]
    write_record(attempt.fleet, {**record, "isles": "9.9"})
    with pytest.raises(UserError, match=r"written by isles 9.9, and isles .* 'port'") as caught:
        read_fleet(attempt)
    assert caught.value.where == str(attempt.fleet)
    assert "use isles 9.9" in caught.value.fix
    assert collect(run_dir).state == "running"
    notes: list[str] = []
    lines = list(shown_lines(run_dir, LogChoice(), notes.append))
    assert "[rank 2] line of 2" in lines
    assert "written by isles 9.9" in notes[0]


def test_a_shared_folder_shows_its_runs_once(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    write_remote(tmp_path, remote("a-1", "elsewhere", path=str(run_dir.path)))
    assert len(remote_runs(tmp_path)) == 1, "another run of the same path"
    write_launch(new_attempt(run_dir), FAR, world_size=1, device="cpu", command=())
    assert remote_runs(tmp_path) == []
    assert find_any("a-1", tmp_path) == run_dir
    # As its start has printed it.
    assert find_any("a-1@elsewhere", tmp_path) == run_dir


def fleet_run(path: Path) -> tuple[RunDir, Attempt]:
    """A run on two hosts, of which this one sees everything."""
    run_dir = bare_run(path)
    attempt = new_attempt(run_dir)
    nodes = (FleetNode(0, "h0", None, "10.0.0.1", 2), FleetNode(1, "h1", None, "10.0.0.2", 1))
    Fleet("manual", nodes, 29500, 2, "cpu", 60.0, "").write(attempt)
    for rank in range(3):
        attempt.rank_log(rank).write_text(f"line of {rank}\n")
    for node in range(2):
        attempt.node_log(node).write_text(f"agent {node}\n")
    return run_dir, attempt


def test_lines_carry_their_node(tmp_path: Path) -> None:
    run_dir, attempt = fleet_run(tmp_path / "a-1")
    assert list(log_lines(run_dir, attempt, LogChoice())) == [
        "[h0 agent] agent 0",
        "[h1 agent] agent 1",
        "[h0 rank 0] line of 0",
        "[h0 rank 1] line of 1",
        "[h1 rank 2] line of 2",
    ]
    second = ["[h1 agent] agent 1", "[h1 rank 2] line of 2"]
    assert list(log_lines(run_dir, attempt, LogChoice(node=1))) == second
    assert list(log_lines(run_dir, attempt, LogChoice(rank=2))) == ["line of 2"]
    blocks = list(shown_lines(run_dir, LogChoice(last=1, by_node=True), print))
    assert blocks[0] == "=== Node 0 (h0) ==="
    assert blocks[2:] == ["=== Node 1 (h1) ===", "[h1 rank 2] line of 2"]
    with pytest.raises(UserError, match="there is no node 7") as caught:
        shown_lines(run_dir, LogChoice(node=7), print)
    assert "0 (h0), 1 (h1)" in caught.value.fix


@each("launcher", ["local", "manual", "nohup", "ssh"])
def test_the_only_node_is_not_asked_by_ssh(tmp_path: Path, launcher: str) -> None:
    run_dir = bare_run(tmp_path / f"{launcher}-1")
    attempt = new_attempt(run_dir)
    node = FleetNode(0, "h0", None, "127.0.0.1", 1)
    Fleet(launcher, (node,), 0, 1, "cpu", 60.0, "").write(attempt)
    attempt.agent_log.write_text("agent\n")
    attempt.rank_log(0).write_text("line of 0\n")
    notes: list[str] = []
    assert "line of 0" in "\n".join(shown_lines(run_dir, LogChoice(), notes.append))
    assert notes == []


def test_one_log_of_each_node_has_all_its_lines(tmp_path: Path) -> None:
    run_dir, attempt = fleet_run(tmp_path / "a-1")
    attempt.rank_log(2).write_text("an earlier start\n")
    signals = Signals(attempt)
    with NodeLog(run_dir, attempt, 1, signals, attempt.node_log(1)):
        signals.expect(0, [2])
        with attempt.rank_log(2).open("a") as log:
            log.write("one\ntwo")
        with attempt.node_log(1).open("a") as log:
            log.write("ranks are started\n")
    path = run_dir.latest_node_log(1)
    assert path.read_text().splitlines() == [
        "[agent] ranks are started",
        "[rank 2] one",
        "[rank 2] two",
    ]
    assert path.is_symlink()
    assert path.resolve().name.startswith("cluster_train_")
    assert path.resolve().name.endswith("_node1.log")


def test_status_names_every_node(tmp_path: Path) -> None:
    run_dir, attempt = fleet_run(tmp_path / "a-1")
    lines = "\n".join(report_lines(collect(run_dir)))
    assert "node 1  h1 (10.0.0.2)  rank 2  has not come yet" in lines
    now = time.time()
    node = {"address": "10.0.0.1", "ranks": 1, "host": "x", "pid": 5, "started": 1.0, "why": ""}
    nodes = [
        {**node, "node": 0, "name": "h0", "first_rank": 0, "state": "there", "last_seen_at": now},
        {**node, "node": 1, "name": "h1", "first_rank": 1, "state": "lost", "why": "silent"},
    ]
    write_record(attempt.nodes, {"nodes": nodes})
    write_record(attempt.findings, {"findings": [{"level": "warning", "text": "slow link"}]})
    attempt.hangs.mkdir()
    write_record(attempt.hangs / "step-120.json", {"text": "rank 3 is behind"})
    report = collect(run_dir)
    text = "\n".join(report_lines(report))
    assert "1 of 2" in text
    assert "is lost: silent" in text
    assert "stuck      rank 3 is behind" in text
    assert "warning: slow link" in text
    assert RunReport(**report.model_dump()) == report, "as another machine reads it"


def test_a_host_that_hangs_keeps_nobody_from_the_lines_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "_SILENT_S", 1.0)
    hangs = stream.Source(("sh", "-c", "echo one; exec sleep 600"), "a1")
    answers = stream.Source(("echo", "two"), "a2")
    notes: list[str] = []
    found = stream._merged_lines([hangs, answers], LogChoice(), notes.append)
    assert list(found) == ["one", "two"]
    assert notes == ["no line from a1 for 1 s: its logs may be cut short"]

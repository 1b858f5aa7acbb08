"""Runs of several nodes and of other machines: found by name, their logs, requests to stop."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from isles.agent.agent import AgentSignals, NodeLog
from isles.errors import UserError
from isles.launch.remote.login import remote_script
from isles.monitor import stream
from isles.monitor.logs import LogChoice
from isles.monitor.outcome import finished_lines
from isles.monitor.status import collect
from isles.monitor.stream import shown_lines
from isles.run.begin import new_attempt
from isles.run.find import find_any, remote_runs, typed_name
from isles.run.nodes import Fleet, FleetNode, read_fleet
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.remote import RemoteRun, forget_remote, list_remotes, write_remote
from isles.run.stop import request_stop
from isles.train.record import Recorder
from isles.train.stop import NOW, StopBeforeTraining, StopSignals
from isles.train.verbs import exported_lines
from tests.deadline import DEADLINE_S, until
from tests.run_records import FAR, recorded_run, two_hosts
from tests.runs import bare_run


def remote(name: str, host: str, started_at: float = 1.0, path: str = "") -> RemoteRun:
    """A run of another machine."""
    where = path or f"/far/runs/{name}"
    return RemoteRun(name, f"me@{host}", where, (), "python3", "ssh", (f"me@{host}",), started_at)


def test_runs_of_other_machines_are_found_by_name(tmp_path: Path) -> None:
    bare_run(tmp_path / "a-1")
    for run in (remote("a-1", "x"), remote("b-1", "x"), remote("b-1", "y", 9e9)):
        write_remote(tmp_path, run)
    assert find_any("a-1@x", tmp_path) == remote("a-1", "x")
    assert find_any("b@x", tmp_path) == remote("b-1", "x")
    assert find_any("b", tmp_path) == remote("b-1", "y", 9e9), "the newest of this name"
    assert find_any(None, tmp_path) == remote("b-1", "y", 9e9)
    assert find_any("a", tmp_path) == RunDir(tmp_path / "a-1"), "newer than the one on x"
    with pytest.raises(UserError, match="matches 2 runs") as caught:
        find_any("a-1", tmp_path)
    assert str(tmp_path / "a-1") in caught.value.fix and "a-1@x" in caught.value.fix


def test_runs_that_are_called_the_same_are_kept_apart(tmp_path: Path) -> None:
    """Two users of one host, each with a run of this name in a home of their own."""
    ann = replace(remote("b-1", "x", path="/home/ann/runs/b-1"), ssh="ann@x")
    bob = remote("b-1", "x", path="/home/bob/runs/b-1")
    for run in (ann, bob):
        write_remote(tmp_path, run)
    with pytest.raises(UserError, match="b-1@x matches 2 runs") as caught:
        find_any("b-1@x", tmp_path)
    assert f"ann@x:{ann.path}" in caught.value.fix and bob.place in caught.value.fix
    assert find_any(bob.place, tmp_path) == bob
    assert find_any("b-1@ann@x", tmp_path) == ann
    forget_remote(tmp_path, ann)
    assert list_remotes(tmp_path) == [bob]


def test_a_shared_folder_shows_its_runs_once(tmp_path: Path) -> None:
    path = tmp_path / "a-1"
    write_remote(tmp_path, remote("a-1", "elsewhere", path=str(path)))
    assert len(remote_runs(tmp_path)) == 1, "another run of the same path"
    run_dir, _ = recorded_run(path, FAR)
    assert remote_runs(tmp_path) == []
    assert find_any("a-1", tmp_path) == run_dir
    assert find_any("a-1@elsewhere", tmp_path) == run_dir, "as its start has printed it"


def test_what_is_to_be_typed_says_where_runs_are(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, there = bare_run(tmp_path / "runs" / "a-1"), bare_run(tmp_path / "out" / "a-1")
    assert (typed_name(here), typed_name(there)) == ("a-1", str(there.path))
    assert write_remote(Path("runs"), remote("b-1", "x")).typed == "b-1@x"
    far = write_remote(Path("my out"), remote("b-1", "x"))
    assert far.typed == "b-1@x --output-dir 'my out'"
    # What isles says on x is shown here, by the name that it has here.
    assert "export ISLES_NAMED='@x --output-dir '\"'\"'my out'\"'\"''" in remote_script(far, [])
    assert "ISLES_MACHINE=me@x" in remote_script(far, [])
    monkeypatch.setenv("ISLES_NAMED", far.behind)
    assert typed_name(there) == "a-1@x --output-dir 'my out'"


def test_an_export_elsewhere_says_where_it_is(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert exported_lines(9, Path("my-model")) == ["exported step 9 to my-model"]
    for machine in ("me@a1", "a1"):
        typed = f"{machine}:{tmp_path}/my-model"
        monkeypatch.setenv("ISLES_MACHINE", machine)
        said, fix = exported_lines(9, Path("my-model"))
        assert said.endswith(f"exported step 9 to {typed}") and f"scp -r {typed} ." in fix
    launch = {"begun_at": time.time() - 172, "launcher": "ssh"}
    run_dir, _ = recorded_run(tmp_path / "home-1", launch, {"state": "finished"})
    write_record(run_dir.summary, {"steps": 600, "elapsed_s": 79.0})
    run_dir.model.mkdir()
    shown = "\n".join(finished_lines(run_dir))
    assert (
        f"model        a1:{run_dir.path}" in shown and f"scp -r a1:{run_dir.model} home-1" in shown
    )
    assert "600 steps in 1m 19s of training, 2m 52s after the first start" in shown
    monkeypatch.setenv("ISLES_MACHINE", "kubernetes:ab12")
    (said,) = exported_lines(9, Path("/m"))
    assert said == "exported step 9 to /m, on the volume of the run's pods"


def test_a_fleet_of_another_version_hinders_only_what_needs_it(tmp_path: Path) -> None:
    launch = {**FAR, "launcher": "manual"}
    run_dir, attempt = recorded_run(tmp_path / "a-1", launch, status={"step": 1})
    two_hosts(attempt, "manual")
    record = read_record(attempt.fleet) or {}
    write_record(attempt.fleet, {**record, "color": "blue"})
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


def test_the_only_node_is_not_asked_by_ssh(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "a-1", FAR)
    node = FleetNode(0, "h0", None, "127.0.0.1", 1)
    Fleet("ssh", (node,), 0, 1, "cpu", 60.0, "").write(attempt)
    attempt.rank_log(0).write_text("line of 0\n")
    notes: list[str] = []
    assert list(shown_lines(run_dir, LogChoice(), notes.append)) == ["line of 0"] and notes == []


def test_one_log_of_each_node_has_all_its_lines(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "a-1", FAR)
    attempt.rank_log(2).write_text("an earlier start\n")
    attempt.node_log(1).write_text("agent 1\n")
    signals = AgentSignals(attempt)
    with NodeLog(run_dir, attempt, 1, signals, attempt.node_log(1)):
        signals.expect(0, [2])
        with attempt.rank_log(2).open("a") as log:
            log.write("one\ntwo")
        with attempt.node_log(1).open("a") as log:
            log.write("ranks are started\n")
    path = run_dir.latest_node_log(1)
    assert path.read_text() == "[agent] ranks are started\n[rank 2] one\n[rank 2] two\n"
    assert path.is_symlink() and re.fullmatch("cluster_train_.*_node1.log", path.resolve().name)


def test_a_host_that_hangs_keeps_nobody_from_the_lines_of_the_others(monkeypatch) -> None:
    monkeypatch.setattr(stream, "_SILENT_S", 1.0)
    hangs = stream.LogCommand(("sh", "-c", "echo one; exec sleep 600"), "a1")
    answers = stream.LogCommand(("echo", "two"), "a2")
    notes: list[str] = []
    found = stream._merged_lines([hangs, answers], LogChoice(), notes.append)
    assert list(found) == ["one", "two"]
    assert notes == ["no line from a1 for 1 s: its logs may be cut short"]


def test_rank_0_gives_signs_of_life_without_progress(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    recorder = Recorder(run_dir, is_main=True, world_size=1, heartbeat_s=0.02)
    recorder.phase("preparing data")
    first = read_record(run_dir.status) or {}
    until(lambda: read_record(run_dir.status) != first)
    status = read_record(run_dir.status) or {}
    assert status["updated_at"] > first["updated_at"]
    assert status["progress_at"] == first["progress_at"]
    recorder.close()


def test_a_request_ends_a_rank_before_the_first_step_and_then_waits_for_a_steps_end(tmp_path):
    for kind, code in (("save", 85), ("interrupt", 130)):
        attempt = new_attempt(bare_run(tmp_path / kind))
        with watched(attempt) as signals:
            with pytest.raises(StopBeforeTraining) as caught:
                request_stop(attempt, kind)
                threading.Event().wait(DEADLINE_S)
            assert (caught.value.code, signals.was_requested) == (code, True)
    attempt = new_attempt(bare_run(tmp_path / "training"))
    with watched(attempt) as signals:
        signals.training_begins()
        assert signals.stop_code == 0
        request_stop(attempt, "save")
        until(lambda: signals.stop_code == 85)
        request_stop(attempt, "now")
        until(lambda: signals.stop_code == NOW)


@contextmanager
def watched(attempt: Attempt) -> Iterator[StopSignals]:
    """A rank looks for requests to stop."""
    signals = StopSignals(attempt)
    try:
        yield signals
    finally:
        signals.restore()

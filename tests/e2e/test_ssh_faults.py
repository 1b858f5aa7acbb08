"""Starts over ssh that cannot succeed, and faults in the middle of a run on several hosts: who and
why; each ends, or goes on, and nothing is left anywhere."""

from __future__ import annotations

import os
import re
import select
import signal
from typing import Any

import pytest

from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.restarts import list_restarts, read_last_step
from tests.deadline import DEADLINE_S
from tests.lab.home import (
    assert_nothing_left,
    begin,
    end,
    isles,
    left,
    link_cut,
    outcome_of,
    processes,
    sh,
    signal_all,
    undone,
    until,
    until_step,
    write_run,
)
from tests.lab.hosts import Lab

NUM_HOSTS = 4


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """a2 has other installations of torch: one that breaks, one that waits."""
    sh(lab, "a2", "mkdir -p /root/bad/torch /root/held/torch")
    sh(lab, "a2", "echo 'raise ImportError(\"libcudart.so.13\")' > /root/bad/torch/__init__.py")
    sh(lab, "a2", "echo 'import signal; signal.pause()' > /root/held/torch/__init__.py")
    return lab


def refused(lab: Lab, *overrides: str, code: int = ExitCode.PREFLIGHT, **run: Any) -> str:
    """What a start says that is refused; nothing is begun and nothing left."""
    write_run(lab, "fault", **run)
    text = isles(lab, "train", "fault.yaml", *overrides, expected=code)
    assert "Traceback" not in text and "fix: " in text
    assert not (lab.shared / "runs" / "fault-1").exists()
    assert_nothing_left(lab)
    return text


def test_a_file_that_the_head_lacks_has_a_line_in_the_run_file(lab: Lab) -> None:
    text = refused(lab, "data.sources.0.path=no.jsonl", code=ExitCode.USER, hosts=["a3", "a1"])
    assert "data.sources.0.path (on host a3): file not found: /shared/no.jsonl" in text


def test_a_full_disk_on_one_host_ends_the_others(lab: Lab) -> None:
    full = "mkdir -p /root/runs; mount -t tmpfs -o size=8k tmpfs /root/runs; "
    full += "head -c 8192 /dev/zero > /root/runs/fill || true"
    with undone(lab, "a2", full, "umount /root/runs"):
        write_run(lab, "full", output_dir="/root/runs")
        text = isles(lab, "train", "full.yaml", expected=None)
    assert "host a2: /root/runs" in text and "no space left on the disk" in text
    outcome = outcome_of(RunDir(lab.root("a1") / "root/runs/full-1").attempt(1))
    assert outcome["state"] == "failed" and outcome["exit_code"]
    assert "no space left" in outcome["reason"]
    assert_nothing_left(lab)


@pytest.mark.long
def test_a_full_disk_on_the_head_in_mid_run_leaves_nothing_running(lab: Lab) -> None:
    """A rank dies while nothing can be written: the run ends, and says why.

    The agent beside it is held up: by then the head's has seen its own rank end, which has only
    lost the other, and has found no room to say so.
    """
    small = "mkdir -p /root/runs; mount -t tmpfs -o size=2m tmpfs /root/runs"
    with undone(lab, "a1", small, "umount /root/runs"):
        write_run(lab, "filled", output_dir="/root/runs", training={"max_steps": 1_000_000})
        command = begin(lab, "train", "filled.yaml")
        try:
            name = "root/runs/filled-1"
            attempt = RunDir(lab.root("a1") / name).attempt(1)
            until_step(attempt, 4)
            sh(lab, "a1", "cat /dev/zero > /root/runs/fill || true")
            record = RunDir(lab.root("a2") / name).attempt(1).rank_record(1)
            (agent,) = processes(lab, "a2", "--node", "1")
            agent.suspend()
            sh(lab, "a2", f"kill -9 {(read_record(record) or {})['pid']}; sleep 5")
            agent.resume()
            text = end(command)
        finally:
            command.kill()
            command.wait()
        assert command.returncode == ExitCode.TRAINING, text
        assert "is full" in text and "Traceback" not in text, text
        assert not attempt.outcome.exists()
        log = RunDir(lab.root("a2") / name).attempt(1).node_log(1).read_text()
        assert "the run has ended with 3" in log and "rank 1 was killed by SIGKILL" in log
        assert_nothing_left(lab)


@pytest.mark.long
def test_a_host_that_cannot_begin_is_named_with_its_last_words(lab: Lab) -> None:
    """Its torch is there, by its version, and cannot be imported."""
    setup = '[ "$(hostname)" != a2 ] || export PYTHONPATH=/root/bad'
    write_run(lab, "words", environment={"setup": [setup]})
    text = isles(lab, "train", "words.yaml", expected=ExitCode.PREFLIGHT)
    assert "host a2: the agent exited with code 1 before its ranks had started" in text
    assert "libcudart.so.13" in text
    outcome = outcome_of(RunDir(lab.shared / "runs/words-1").attempt(1))
    assert outcome["state"] == "failed" and outcome["error"]["where"] == "host a2"
    assert_nothing_left(lab)


def start(lab: Lab, name: str, **options: Any) -> Attempt:
    """A run of which nobody is left who started it, with steps done."""
    write_run(lab, name, training={"max_steps": 100_000}, output_dir="/root/runs", **options)
    isles(lab, "train", f"{name}.yaml", "--detach")
    attempt = RunDir(lab.root("a1") / "root" / "runs" / f"{name}-1").attempt(1)
    steps(attempt, 0, 3)
    return attempt


def steps(attempt: Attempt, restart: int, more: int) -> None:
    """Wait for so many more steps of a restart."""
    first = read_last_step(attempt, restart) or 0
    what = f"{more} steps of restart {restart}"
    until(lambda: (read_last_step(attempt, restart) or 0) >= first + more, what)


def kill(lab: Lab, host: str, record: dict[str, Any]) -> None:
    sh(lab, host, f"kill -9 {record['pid']}")


def test_a_cut_costs_nothing_a_rank_is_started_again_a_lost_host_ends_the_run(lab: Lab) -> None:
    attempt = start(lab, "fixed")
    with link_cut(lab, "a3"):
        select.select([], [], [], 8.0)  # the cut itself lasts so long
    steps(attempt, 0, 3)
    assert not list_restarts(attempt), "eight seconds without a network cost no rank"

    # The record of rank 1 is on its own host alone: nothing of this run is shared.
    there = RunDir(lab.root("a2") / "root" / "runs" / "fixed-1").attempt(1)
    kill(lab, "a2", read_record(there.rank_record(1)) or {})
    until(lambda: read_last_step(attempt, 1), "the ranks are started again")
    (restart,) = list_restarts(attempt)
    assert restart.text.startswith("rank 1 on a2 was killed by SIGKILL at step")
    assert restart.text.endswith("(restart 1 of 3)")
    assert restart.root_cause is not None and restart.root_cause["host"] == "a2"

    with link_cut(lab, "a3"):
        outcome = outcome_of(attempt)
        assert outcome["exit_code"] == ExitCode.COMMUNICATION
        what = str(outcome["error"]["what"])
        assert "node 2 (a3, 10.77.1.3) is lost: no message from it for 2" in what
        assert outcome["error"]["host"] == "a3"
        # Also on the host that nobody reaches.
        assert_nothing_left(lab)
    log = lab.root("a3") / "root" / "runs" / "fixed-1" / "attempts" / "001" / "node-2.log"
    assert re.search(r"no message from a1 \(10.77.1.1:295\d\d\) for", log.read_text())


@pytest.mark.long
def test_a_host_that_dies_is_done_without_and_no_run_outlives_its_coordinator(lab: Lab) -> None:
    attempt = start(lab, "elastic", hosts=["a1", "a2", "a4"], nodes="2:3")
    os.kill(lab.pid1("a4"), signal.SIGKILL)
    until(lambda: read_last_step(attempt, 1), "two go on")
    (restart,) = list_restarts(attempt)
    assert restart.why == "node 2 (a4, 10.77.1.4) is gone"
    assert (restart.world_size, restart.is_counted) == (2, False)
    nodes = (read_record(attempt.nodes) or {})["nodes"]
    assert [node["state"] for node in nodes] == ["there", "there", "lost"]

    kill(lab, "a1", read_record(attempt.launch) or {})
    assert_nothing_left(lab)
    log = lab.root("a2") / "root" / "runs" / "elastic-1" / "attempts" / "001" / "node-1.log"
    gone = r"the coordinator on a1 \(10.77.1.1:295\d\d\), through which .* is gone"
    assert re.search(gone, log.read_text())
    text = isles(lab, "status", "/root/runs/elastic-1", host="a1")
    assert "killed: its processes are gone" in text and "node 0" in text, text
    assert not left(lab)


@pytest.mark.long
@pytest.mark.parametrize("how", ["ctrl-c", "killed", "cut off"])
def test_a_laptop_that_goes_in_mid_start_leaves_nothing(lab: Lab, how: str) -> None:
    """The run directory says that it was not started. The last test here: ctl may need a moment to
    find the others again.

    The torch of a2 takes for ever to import, so that the start is certainly still on its way.
    """
    name = f"gone-{how.replace(' ', '-')}"
    setup = '[ "$(hostname)" != a2 ] || export PYTHONPATH=/root/held'
    write_run(lab, name, environment={"setup": [setup]})
    attempt = RunDir(lab.shared / "runs" / f"{name}-1").attempt(1)
    typed = ("train", f"{name}.yaml")
    command = begin(lab, *typed)
    try:
        until(lambda: attempt.node_log(2).exists(), "the agents are started")
        match how:
            case "ctrl-c":
                signal_all(lab, "ctl", signal.SIGINT, *typed)
                assert command.wait(timeout=DEADLINE_S) == ExitCode.INTERRUPTED
            case "killed":
                signal_all(lab, "ctl", signal.SIGKILL, *typed)
            case _:
                lab.link("ctl", "cut")
        assert_nothing_left(lab)
        outcome = outcome_of(attempt)
        assert outcome["state"] == "failed" and "the run was not started" in outcome["reason"]
    finally:
        lab.link("ctl", "restore")
        for process in processes(lab, "ctl", *typed):
            process.kill()
        command.kill()
        command.wait()

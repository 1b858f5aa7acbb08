"""Faults in the middle of a run on several hosts: each ends, or goes on, and nothing is left."""

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
from tests.lab.home import (
    assert_nothing_left,
    isles,
    left,
    link_cut,
    outcome_of,
    sh,
    until,
    write_run,
)
from tests.lab.hosts import Lab

NUM_HOSTS = 4
LONG = {"training": {"max_steps": 100_000}, "output_dir": "/root/runs"}


def start(lab: Lab, name: str, **options: Any) -> Attempt:
    """A run of which nobody is left who started it, with steps done."""
    write_run(lab, name, **LONG, **options)
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
        assert "node 2 (a3, 10.77.1.3) is lost: it has not been heard of for 2" in what
        assert outcome["error"]["host"] == "a3"
        # Also on the host that nobody reaches.
        assert_nothing_left(lab)
    log = lab.root("a3") / "root" / "runs" / "fixed-1" / "attempts" / "001" / "node-2.log"
    assert re.search(r"a1 \(10.77.1.1:295\d\d\) has not been heard of for", log.read_text())


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

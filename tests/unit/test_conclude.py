"""What follows when the ranks of a job have ended: told by the records and logs they left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from isles.run.records import read_record, write_record
from isles.run.restarts import list_restarts
from isles.agent.conclude import begin, conclude
from isles.agent.requeue import go_on
from tests.unit.test_slurm import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_node_that_has_not_come_is_named(job: Job) -> None:
    (job.attempt.path / "hosts").write_text("a1\na2\n")
    job.attempt.node_log(0).write_text(
        "2026-01-01 a1 joins the others at 10.0.0.1:29507\n"
        "DistStoreError: Timed out after 121 seconds waiting for clients. 1/2 clients joined.\n"
    )
    assert conclude(job.gang, 1, terminated=False) == "start"
    assert (
        "not started within start_timeout (120 s): node 1 (a2)" in list_restarts(job.attempt)[0].why
    )
    with job.attempt.node_log(0).open("a") as log:
        log.write("---- restart 1 ----\n2026-01-01 a1 joins the others at 10.0.0.1:29507\n")
    assert conclude(job.gang, 1, terminated=False) == "5"


def test_what_a_log_says_of_an_earlier_start_is_not_said_of_this_one(job: Job) -> None:
    """A node that has come once and not again, and how its rank ended then."""
    (job.attempt.path / "hosts").write_text("a1\na2\n")
    joins = "2026-01-01 joins the others at 10.0.0.1:29507\n"
    summary = "  rank      : 3 (local_rank: 0)\n  exitcode  : -9 (pid: 9)\n"
    for node in range(2):
        job.attempt.node_log(node).write_text(joins + summary * node)
    assert conclude(job.gang, 1, terminated=False) == "start"
    with job.attempt.node_log(0).open("a") as log:
        log.write(f"---- restart 1 ----\n{joins}")
    conclude(job.gang, 1, terminated=False)
    error = (read_record(job.attempt.outcome) or {}).get("error")
    told = str(error) + str([restart.why for restart in list_restarts(job.attempt)][1:])
    assert "node 1 (a2)" in told and "SIGKILL" not in told


def test_a_stop_asked_for_while_the_job_is_queued_again_holds(job: Job) -> None:
    """The request of a user may take the place of the script's own at any moment."""
    own = {"kind": "save", "at": 0, "requeue": True}
    for request in (own, {"kind": "save", "at": 1}):
        write_record(job.attempt.stop_request, request)
        go_on(job.gang, "the time limit was near")
    assert begin(job.gang) == "85"
    assert (read_record(job.attempt.outcome) or {})["state"] == "stopped"


def test_a_rank_that_was_killed_is_named_and_all_start_again(job: Job) -> None:
    for rank, host in enumerate(("a1", "a1", "a2", "a2")):
        write_record(job.attempt.rank_record(rank), {"restart": 0, "host": host, "pid": 9})
    summary = "  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 9)\n"
    job.attempt.node_log(0).write_text(summary.format(rank=0, code=-15))
    job.attempt.node_log(1).write_text(summary.format(rank=3, code=-9))
    assert conclude(job.gang, 1, terminated=False) == "start"
    (restart,) = list_restarts(job.attempt)
    assert restart.why == "rank 3 on a2 was killed by SIGKILL" and restart.world_size == 4

    with job.attempt.node_log(1).open("a") as log:
        log.write(f"---- restart 1 ----\n{summary.format(rank=2, code=-9)}")
        log.write("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n")
    write_record(job.attempt.rank_record(0), {"restart": 1, "host": "a1", "pid": 9})
    assert conclude(job.gang, 1, terminated=False) == "4"
    error = (read_record(job.attempt.outcome) or {})["error"]
    assert "rank 2" in error["what"] and "oom_kill" in error["what"]
    assert "memory_per_node" in error["fix"]


def test_a_limit_that_leaves_no_time_ends_the_run(job: Job) -> None:
    for expected in ("requeue", "3"):
        write_record(job.attempt.stop_request, {"kind": "save", "at": 0, "requeue": True})
        write_record(job.attempt.stopped, {"exit_code": 85, "step": None})
        assert begin(job.gang) == "start"
        assert conclude(job.gang, 0, terminated=False) == expected
    error = (read_record(job.attempt.outcome) or {})["error"]
    assert "no time for a single step" in error["what"] and "save_before" in error["fix"]


def test_a_job_that_slurm_takes_off_its_nodes_goes_on_later(job: Job) -> None:
    """After preemption the run has an outcome, since it may have been scancel; until it begins."""
    write_record(job.attempt.rank_record(0), {"restart": 0, "pid": 9})
    write_record(job.attempt.stopped, {"exit_code": 85, "step": 5})
    assert conclude(job.gang, 0, terminated=True) == "85"
    assert (read_record(job.attempt.outcome) or {})["state"] == "stopped"
    assert begin(job.gang) == "start"
    assert not job.attempt.outcome.exists()
    assert "taken off its nodes" in list_restarts(job.attempt)[0].text

    # A node that fails leaves no word at all.
    write_record(job.attempt.rank_record(0), {"restart": 1, "pid": 9})
    assert begin(job.gang) == "start"
    assert len(list_restarts(job.attempt)) == 2

    outcome = {"state": "finished", "exit_code": 0, "at": time.time()}
    write_record(job.attempt.outcome, outcome)
    assert begin(job.gang) == "0", "a run that is over is not started again"

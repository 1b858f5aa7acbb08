"""A run in a job of a queue: what an end of its ranks means, and whether the job goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from isles.agent.requeue import QueuedRun
from isles.errors import ExitCode
from isles.launch.queue.slurm import SlurmAllocation
from isles.run.records import read_record, write_record
from isles.run.restarts import list_restarts
from tests.each import each
from tests.slurm_job import OWN, Job
from tests.unit.test_begin import add_checkpoint

NODES = 'case "$1 $2" in "show hostnames") echo a1; exit;; esac'
NOT_PREEMPTED = "echo JobId=7 JobState=RUNNING PreemptTime=None X=1"
PREEMPTED = "echo JobId=7 JobState=RUNNING PreemptTime=2026-01-01T00:00:00 X=1"


def queued(job: Job, scontrol: str = "exit 1") -> QueuedRun:
    """The run as its job sees it; `scontrol`: bash that answers all but the names of the nodes."""
    job.program("scontrol", f"{NODES}\n{scontrol}")
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a1"}
    allocation = SlurmAllocation(job.launcher, job.attempt, environ)
    return QueuedRun(job.run_dir, job.attempt, job.config, allocation)


def saved(job: Job, step: int | None = 3) -> None:
    """What rank 0 leaves when it was asked to stop in a job."""
    write_record(job.attempt.stopped, {"exit_code": 85, "step": step, "reason": "asked to stop"})
    write_record(job.attempt.rank_record(0), {"restart": 0, "pid": 9})


def saved_before_limit(job: Job, scontrol: str = "exit 1") -> QueuedRun:
    """The run after the time limit was near, and its ranks have saved and ended."""
    run = queued(job, scontrol)
    run.limit_is_near()
    saved(job)
    run.stopped()
    assert run.is_requeued
    return run


def outcome(job: Job) -> dict[str, Any]:
    return read_record(job.attempt.outcome) or {}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_saved_before_the_limit_the_job_is_queued_again(job: Job) -> None:
    assert saved_before_limit(job, "exit 0").queue_again() == 0
    assert "scontrol requeue 7" in job.calls.read_text()
    for path in (job.attempt.outcome, job.attempt.stopped, job.attempt.stop_request):
        assert not path.exists()
    (restart,) = list_restarts(job.attempt)
    assert "the time limit of Slurm job 7 was near" in restart.text and not restart.is_counted


def test_a_job_that_slurm_does_not_requeue_is_submitted_again(job: Job) -> None:
    run = saved_before_limit(job)
    job.program("sbatch", "echo 8")
    assert run.queue_again() == 0
    again = f"sbatch --parsable --dependency=afterany:7 {job.attempt.script}"
    assert again in job.calls.read_text()
    job.program("scontrol", "echo JobId=$5 JobState=RUNNING Reason=None NodeList=a1")
    assert job.ask().job_id == "8"


def test_a_job_that_cannot_be_queued_again_is_stopped_with_the_reason(job: Job) -> None:
    run = saved_before_limit(job)
    job.program("sbatch", "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    assert run.queue_again() == ExitCode.REQUEUE
    assert outcome(job)["state"] == "stopped"
    assert "everything is saved" in outcome(job)["reason"]
    assert "QOSMaxSubmit" in outcome(job)["reason"]


@each(("kind", "code"), [("save", 85), ("interrupt", 130), ("now", 130)])
def test_a_stop_that_a_user_wants_is_the_end(tmp_path: Path, kind: str, code: int) -> None:
    job = Job(tmp_path)
    write_record(job.attempt.stop_request, {"kind": kind, "by": "me", "at": 0})
    run = queued(job)
    run.stopped()
    assert not run.is_requeued
    assert (outcome(job)["state"], outcome(job)["exit_code"]) == ("stopped", code)


def test_a_stop_asked_for_while_the_job_is_queued_again_holds(job: Job) -> None:
    saved_before_limit(job)
    write_record(job.attempt.stop_request, {"kind": "save", "by": "me", "at": 1})
    assert queued(job).begin() == 85
    assert outcome(job)["state"] == "stopped"


def test_a_limit_that_leaves_no_time_ends_the_run(job: Job) -> None:
    for is_last in (False, True):
        run = queued(job)
        assert run.begin() is None
        run.limit_is_near()
        write_record(job.attempt.stopped, {"exit_code": 85, "step": None})
        run.stopped()
        assert run.is_requeued != is_last
    error = outcome(job)["error"]
    assert "no time for a single step" in error["what"] and "save_before" in error["fix"]


def test_a_job_that_slurm_takes_off_its_nodes_goes_on_later(job: Job) -> None:
    saved(job, step=5)
    run = queued(job)
    run.is_terminated = True
    run.stopped()
    assert not run.is_requeued
    assert outcome(job)["state"] == "stopped", "it may have been scancel"
    assert queued(job).begin() is None
    assert not job.attempt.outcome.exists()
    assert "taken off its nodes" in list_restarts(job.attempt)[0].text

    # A node that fails leaves no word at all.
    write_record(job.attempt.rank_record(0), {"restart": 1, "pid": 9})
    assert queued(job).begin() is None
    assert len(list_restarts(job.attempt)) == 2

    end = {"state": "finished", "exit_code": 0, "at": time.time()}
    write_record(job.attempt.outcome, end)
    assert queued(job).begin() == 0, "a run that is over is not started again"


def test_a_job_that_loses_its_nodes_again_and_again_is_ended(job: Job) -> None:
    answers = []
    for restart in range(14):
        write_record(job.attempt.rank_record(0), {"restart": restart, "pid": 9})
        if restart == 3:
            add_checkpoint(job.run_dir, 8)
        answers.append(queued(job).begin())
    assert answers == [None] * 13 + [3], "ten times in vain; a checkpoint makes them ten again"
    what = outcome(job)["error"]["what"]
    assert "was taken off its nodes, and it has come no further in 11 starts" in what
    assert what.endswith("the last step that was saved is 8")


def test_preemption_with_a_time_of_grace_queues_the_job_again(job: Job) -> None:
    # Slurm tells the agents alone, and does nothing more by itself.
    run = queued(job, PREEMPTED)
    saved(job)
    run.stopped()
    assert run.is_requeued
    (restart,) = list_restarts(job.attempt)
    assert "another job took the nodes of Slurm job 7" in restart.text


def test_a_node_that_is_lost_costs_the_job_its_place_and_the_run_nothing(job: Job) -> None:
    run = queued(job)
    assert run.lost("node 1 (a2) is lost") and run.is_requeued
    assert "node 1 (a2) is lost" in list_restarts(job.attempt)[0].text
    run = queued(job)
    run.is_terminated = True
    assert not run.lost("node 1 (a2) is lost"), "the job is being ended: nobody is to blame"


def test_a_script_that_asks_to_be_started_again_is_queued_again(tmp_path: Path) -> None:
    job, requeued = Job(tmp_path, OWN), []
    for _ in range(21):
        saved(job, None)
        run = queued(job, NOT_PREEMPTED)
        run.stopped()
        requeued.append(run.is_requeued)
    assert requeued == [True] * 20 + [False], "it is not started for ever"
    error = outcome(job)["error"]
    assert "no further in 21 starts" in error["what"] and "isles.report" in error["fix"]

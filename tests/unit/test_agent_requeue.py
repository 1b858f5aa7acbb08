"""A run in a job of a queue: what an end of its ranks means, and whether the job goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from isles.agent.failure import failure_report, oom_kills
from isles.agent.requeue import QueuedRun
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.errors import ExitCode
from isles.launch.queue.slurm import SlurmAllocation
from isles.run.records import read_record, write_record
from isles.run.restarts import list_restarts
from tests.each import each
from tests.unit.test_begin import add_checkpoint
from tests.unit.test_slurm import OWN, Job

NODES = 'case "$1 $2" in "show hostnames") echo a1; exit;; esac'


def queued(job: Job, scontrol: str = "exit 1") -> QueuedRun:
    """The run as its job sees it; `scontrol`: bash that answers all but the names of the nodes."""
    job.program("scontrol", f"{NODES}\n{scontrol}")
    launcher = job.config.clusters[0].launcher
    assert isinstance(launcher, SlurmLauncherConfig)
    launcher = launcher.model_copy(update={"bin_path": str(job.bin)})
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a1"}
    allocation = SlurmAllocation(launcher, job.attempt, environ)
    return QueuedRun(job.run_dir, job.attempt, job.config, allocation)


def saved(job: Job, step: int | None = 3) -> None:
    """What rank 0 leaves when it was asked to stop in a job."""
    write_record(job.attempt.stopped, {"exit_code": 85, "step": step, "reason": "asked to stop"})
    write_record(job.attempt.rank_record(0), {"restart": 0, "pid": 9})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_saved_before_the_limit_the_job_is_queued_again(job: Job) -> None:
    run = queued(job, "exit 0")
    run.limit_is_near()
    assert (read_record(job.attempt.stop_request) or {})["by"].startswith("Slurm job 7, before")
    saved(job)
    run.stopped()
    assert run.is_requeued and run.queue_again() == 0
    assert "scontrol requeue 7" in job.calls.read_text()
    assert not job.attempt.outcome.exists() and not job.attempt.stopped.exists()
    assert not job.attempt.stop_request.exists()
    (restart,) = list_restarts(job.attempt)
    assert "the time limit of Slurm job 7 was near" in restart.text and not restart.is_counted


def test_a_job_that_slurm_does_not_requeue_is_submitted_again(job: Job) -> None:
    run = queued(job)
    run.limit_is_near()
    saved(job)
    run.stopped()
    job.program("sbatch", "echo 8")
    assert run.queue_again() == 0
    again = f"sbatch --parsable --dependency=afterany:7 {job.attempt.script}"
    assert again in job.calls.read_text()
    job.program("scontrol", "echo JobId=$5 JobState=RUNNING Reason=None NodeList=a1")
    assert job.ask().job_id == "8"


def test_a_job_that_cannot_be_queued_again_is_stopped_and_says_why(job: Job) -> None:
    run = queued(job)
    run.limit_is_near()
    saved(job)
    run.stopped()
    job.program("sbatch", "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    assert run.queue_again() == ExitCode.REQUEUE
    outcome = read_record(job.attempt.outcome) or {}
    assert outcome["state"] == "stopped"
    assert "everything is saved" in outcome["reason"] and "QOSMaxSubmit" in outcome["reason"]


@each(("kind", "code"), [("save", 85), ("interrupt", 130), ("now", 130)])
def test_a_stop_that_a_user_wants_is_the_end(tmp_path: Path, kind: str, code: int) -> None:
    job = Job(tmp_path)
    write_record(job.attempt.stop_request, {"kind": kind, "by": "me", "at": 0})
    run = queued(job)
    run.stopped()
    assert not run.is_requeued
    outcome = read_record(job.attempt.outcome) or {}
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", code)


def test_a_stop_asked_for_while_the_job_is_queued_again_holds(job: Job) -> None:
    """The request of a user may take the place of the job's own at any moment."""
    run = queued(job)
    run.limit_is_near()
    saved(job)
    run.stopped()
    assert run.is_requeued
    write_record(job.attempt.stop_request, {"kind": "save", "by": "me", "at": 1})
    assert queued(job).begin() == 85
    assert (read_record(job.attempt.outcome) or {})["state"] == "stopped"


def test_a_limit_that_leaves_no_time_ends_the_run(job: Job) -> None:
    for is_last in (False, True):
        run = queued(job)
        assert run.begin() is None
        run.limit_is_near()
        write_record(job.attempt.stopped, {"exit_code": 85, "step": None})
        run.stopped()
        assert run.is_requeued != is_last
    error = (read_record(job.attempt.outcome) or {})["error"]
    assert "no time for a single step" in error["what"] and "save_before" in error["fix"]


def test_a_job_that_slurm_takes_off_its_nodes_goes_on_later(job: Job) -> None:
    """After preemption the run has an outcome, since it may have been scancel; until it begins."""
    saved(job, step=5)
    run = queued(job)
    run.is_terminated = True
    run.stopped()
    assert not run.is_requeued
    assert (read_record(job.attempt.outcome) or {})["state"] == "stopped"
    assert queued(job).begin() is None
    assert not job.attempt.outcome.exists()
    assert "taken off its nodes" in list_restarts(job.attempt)[0].text

    # A node that fails leaves no word at all.
    write_record(job.attempt.rank_record(0), {"restart": 1, "pid": 9})
    assert queued(job).begin() is None
    assert len(list_restarts(job.attempt)) == 2

    outcome = {"state": "finished", "exit_code": 0, "at": time.time()}
    write_record(job.attempt.outcome, outcome)
    assert queued(job).begin() == 0, "a run that is over is not started again"


def test_a_job_that_loses_its_nodes_again_and_again_is_ended(job: Job) -> None:
    """Ten times in vain; a checkpoint makes them ten again."""
    answer: int | None = None
    for restart in range(14):
        write_record(job.attempt.rank_record(0), {"restart": restart, "pid": 9})
        if restart == 3:
            add_checkpoint(job.run_dir, 8)
        answer = queued(job).begin()
        assert answer is None or restart == 13, restart
    assert answer == 3
    error = (read_record(job.attempt.outcome) or {})["error"]
    assert "was taken off its nodes, and it has come no further in 11 starts" in error["what"]
    assert error["what"].endswith("the last step that was saved is 8")


def test_preemption_with_a_time_of_grace_queues_the_job_again(job: Job) -> None:
    """Slurm tells the agents alone, and does nothing more by itself."""
    run = queued(job, "echo JobId=7 JobState=RUNNING PreemptTime=2026-01-01T00:00:00 X=1")
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
    job = Job(tmp_path, text=OWN)
    for _ in range(20):
        saved(job, None)
        run = queued(job, "echo JobId=7 JobState=RUNNING PreemptTime=None X=1")
        run.stopped()
        assert run.is_requeued
    saved(job, None)
    run = queued(job, "echo JobId=7 JobState=RUNNING PreemptTime=None X=1")
    run.stopped()
    assert not run.is_requeued, "it is not started for ever"
    error = (read_record(job.attempt.outcome) or {})["error"]
    assert "no further in 21 starts" in error["what"] and "isles.report" in error["fix"]


def test_a_rank_that_the_kernel_killed_for_its_memory_is_named_so(job: Job, tmp_path: Path) -> None:
    own = tmp_path / "own"
    for line, name, text in (
        ("0::/job_7/step_0", "job_7/step_0/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("9:cpu,memory:/job_7", "memory/job_7/memory.oom_control", "under_oom 0\noom_kill 2\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        own.write_text(f"7:pids:/x\n{line}\n")
        assert oom_kills(tmp_path, own) == 2
    assert oom_kills(tmp_path / "nowhere", own) == 0

    def killed(*, has_no_memory: bool) -> dict[str, object]:
        report = failure_report(job.attempt, 0, [0, 1], 2, {1: -9}, has_no_memory=has_no_memory)
        found: dict[str, object] = report["root_cause"]
        return found

    assert killed(has_no_memory=False)["exit_code"] == ExitCode.TRAINING
    error = killed(has_no_memory=True)
    assert error["exit_code"] == ExitCode.OUT_OF_MEMORY and error["will_recur"]
    assert "rank 1 was killed by SIGKILL" in str(error["what"])
    assert "memory_per_node" in str(error["fix"])

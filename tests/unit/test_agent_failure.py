"""Which error caused the others, what follows from a death, and from an end in a queue's job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from isles.agent.failure import decide, failure_report, find_root_cause, oom_kills
from isles.agent.requeue import QueuedRun
from isles.errors import ExitCode
from isles.launch.queue.slurm import SlurmAllocation
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.restarts import list_restarts
from tests.agent_table import error_of
from tests.each import each
from tests.runs import bare_run
from tests.slurm_job import OWN, Job
from tests.unit.test_begin import add_checkpoint


def test_the_earliest_error_of_its_own_is_the_cause() -> None:
    lost = error_of(0, 1.0, is_communication=True)
    first, second = error_of(2, 2.0), error_of(1, 3.0)
    found = find_root_cause([lost, second, first], {0: 5, 1: 1, 2: 1}, range(3))
    assert found is first


def test_ranks_that_have_lost_one_of_another_node_are_no_cause() -> None:
    lost = [error_of(rank, 1.0, is_communication=True) for rank in (0, 1)]
    assert find_root_cause(lost, {0: 5, 1: 5}, range(2), are_all=False) is None
    assert find_root_cause(lost, {0: 5, 1: 5}, range(2)) is lost[0]


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunDir, Attempt]:
    run_dir = bare_run(tmp_path / "r-1")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    return run_dir, attempt


def test_progress_earns_a_restart_until_they_are_used_up(run: tuple[RunDir, Attempt]) -> None:
    decisions = []
    for restart, step in enumerate((10, 20, 30)):
        run[1].last_step.write_text(f"{restart} {step}")
        decisions.append(decide(*run, restart, error_of(1, 1.0), max_restarts=2).decision)
    assert decisions == ["restart", "restart", "fail"]
    outcome = read_record(run[1].outcome) or {}
    assert (outcome["state"], outcome["exit_code"], outcome["step"]) == ("failed", 3, 30)
    assert outcome["error"]["note"] == "all 2 restarts of this start are used up"


def test_a_second_death_at_the_same_step_ends_the_run(run: tuple[RunDir, Attempt]) -> None:
    root_cause = error_of(1, 1.0, is_script=True)  # a script that reports its steps is no exception
    run[1].last_step.write_text("0 10")
    assert decide(*run, 0, root_cause, max_restarts=9).decision == "restart"
    run[1].last_step.write_text("1 10")
    found = decide(*run, 1, root_cause, max_restarts=9)
    assert found.decision == "fail"
    assert "without progress: at step 10 before, at step 10 now" in (found.root_cause or {})["note"]


def test_a_script_that_reports_no_step_is_started_again(run: tuple[RunDir, Attempt]) -> None:
    for restart in range(3):
        found = decide(*run, restart, error_of(1, 1.0, is_script=True), max_restarts=3)
        assert found.decision == "restart"


def test_a_script_elsewhere_that_has_reported_steps_is_started_again(
    run: tuple[RunDir, Attempt],
) -> None:
    # As a host without the first host's records sees it.
    root_cause = error_of(1, 1.0, kind="ScriptFailed", is_script=True, will_recur=True)
    run[1].last_step.write_text("0 7")
    assert decide(*run, 0, root_cause, max_restarts=3).decision == "restart"
    assert read_record(run[1].outcome) is None
    run[1].last_step.unlink()
    assert decide(*run, 1, root_cause, max_restarts=3).decision == "fail"
    assert (read_record(run[1].outcome) or {})["exit_code"] == ExitCode.TRAINING


def test_a_death_after_a_stop_was_asked_for_is_that_stop(run: tuple[RunDir, Attempt]) -> None:
    run[1].last_step.write_text("0 10")
    write_record(run[1].rank_record(0), {"rank": 0})
    found = decide(*run, 0, error_of(1, 1.0), max_restarts=9, stop=ExitCode.INTERRUPTED)
    assert found.decision == "stop"
    outcome = read_record(run[1].outcome) or {}
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", int(ExitCode.INTERRUPTED))
    assert "before it could save" in outcome["reason"]


def test_a_rank_that_the_kernel_killed_for_its_memory_is_named_so(
    run: tuple[RunDir, Attempt],
) -> None:
    def killed(*, has_no_memory: bool) -> dict[str, Any]:
        report = failure_report(run[1], 0, [0, 1], 2, {1: -9}, has_no_memory=has_no_memory)
        found: dict[str, Any] = report["root_cause"]
        return found

    assert killed(has_no_memory=False)["exit_code"] == ExitCode.TRAINING
    found = killed(has_no_memory=True)
    assert found["exit_code"] == ExitCode.OUT_OF_MEMORY and found["will_recur"]
    assert "rank 1 was killed by SIGKILL" in found["what"]
    assert "memory_per_node" in found["fix"]


def test_kills_for_memory_are_counted_in_both_kinds_of_cgroup(tmp_path: Path) -> None:
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


NODES = 'case "$1 $2" in "show hostnames") echo a1; exit;; esac'
NOT_PREEMPTED = "echo JobId=7 JobState=RUNNING PreemptTime=None X=1"


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

"""The launcher pbs over pretend hosts, with a stand-in for PBS (tests/lab/pbs): real ssh, real
nodes, real ranks; the queue itself is a small program of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from isles.launch.queue.job import training_job
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.lab.home import (
    assert_nothing_left,
    assert_stopped,
    isles,
    outcome_of,
    sh,
    until,
    write_run,
)
from tests.lab.hosts import Lab
from tests.lab.pbs import pbs
from tests.runs import losses_of, rows_of

NUM_HOSTS = 2
NODES = ("a1", "a2")
SHAPE = {"nodes": 2, "gpus_per_node": 1, "device": "cpu", "max_restarts": 0}


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Iterator[Lab]:
    with pbs(lab, NODES):
        yield lab


def submit(lab: Lab, name: str, launcher: dict[str, Any], steps: int, **more: Any) -> RunDir:
    """Write a run file for two nodes, and start it."""
    launcher = {"kind": "pbs", "time": "1h", **launcher}
    write_run(lab, name, launcher=launcher, training={"max_steps": steps}, **SHAPE, **more)
    isles(lab, "train", f"{name}.yaml", "--detach")
    return RunDir(lab.shared / "runs" / f"{name}-1")


def job_of(lab: Lab, run_dir: RunDir) -> dict[str, Any]:
    """How its job stands, by `isles status`."""
    isles(lab, "status", run_dir.name, "--json")
    return read_record(run_dir.attempt(1).job) or {}


def logs(run_dir: RunDir) -> str:
    paths = sorted(run_dir.attempt(1).path.glob("*.log"))
    return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in paths)


def wait_for_job(lab: Lab, run_dir: RunDir) -> None:
    """Until the job of a run is over, and nothing of it is left."""
    until(lambda: job_of(lab, run_dir).get("state") == "ended", lambda: logs(run_dir))
    assert_nothing_left(lab, NODES)


@pytest.fixture(scope="module")
def alone(lab: Lab) -> list[float]:
    """Losses of the same run on one machine."""
    here = {"launcher": None, "workdir": None, "gpus_per_node": 1, "device": "cpu"}
    write_run(lab, "alone", training={"max_steps": 6}, **here)
    isles(lab, "train", "alone.yaml", host="a1")
    return losses_of(RunDir(lab.shared / "runs/alone-1"))


def assert_trained(lab: Lab, run_dir: RunDir, losses: list[float]) -> None:
    """The mathematics of one machine; both nodes and their links were looked at before."""
    attempt = run_dir.attempt(1)
    assert outcome_of(attempt)["state"] == "finished"
    wait_for_job(lab, run_dir)
    assert losses_of(run_dir) == pytest.approx(losses, rel=1e-5)
    records = [read_record(attempt.rank_record(rank)) or {} for rank in (0, 1)]
    assert [record["host"] for record in records] == list(NODES)
    found = read_record(attempt.findings) or {}
    assert found["summary"]["errors"] == 0, found
    seen = {finding["id"]: finding for finding in found["findings"]}
    assert seen["reduce.works"]["measured"] == "2 ranks"
    hosts = {finding["where"] for finding in found["findings"] if finding["id"] == "os.kernel"}
    assert hosts == set(NODES)


def test_two_nodes_train_as_one_machine_does(lab: Lab, alone: list[float]) -> None:
    run_dir = submit(lab, "ddp", {"save_before": "5m", "check": True}, steps=6)
    assert_trained(lab, run_dir, alone)
    assert "finished" in isles(lab, "status")


def goes_on(lab: Lab, name: str, save_after: int) -> RunDir | None:
    """A run whose jobs save after so many seconds, in its second job; None: that is too short.

    A busy machine may need longer for the start of one job than for that of another.
    """
    launcher = {"time": "2h", "save_before": f"{7200 - save_after}s"}
    run_dir = submit(lab, name, launcher, steps=10**6, strategy={"kind": "fsdp"})
    attempt = run_dir.attempt(1)
    first = (read_record(attempt.launch) or {})["job_id"]

    def is_next() -> bool:
        return training_job(attempt) not in (None, first)

    until(lambda: is_next() or attempt.outcome.exists(), lambda: logs(run_dir))
    checkpoints = list_checkpoints(run_dir)
    if not attempt.outcome.exists() and not checkpoints:
        isles(lab, "stop", run_dir.name)
        wait_for_job(lab, run_dir)
        return None
    if not attempt.outcome.exists():
        # The run is alive all the time, though its first job is over.
        said = isles(lab, "train", f"{name}.yaml", "--detach", expected=None)
        assert "is running as PBS job" in said or "is queued again as PBS job" in said
        saved = checkpoints[-1].step
        assert saved > 0
        until(lambda: len(losses_of(run_dir)) > saved + 2 or attempt.outcome.exists())
    outcome = read_record(attempt.outcome)
    if outcome is None:
        return run_dir
    assert "too short for a single step" in outcome["reason"], outcome
    return None


@pytest.mark.long
def test_time_is_up_and_the_next_job_goes_on_until_qdel_by_hand(lab: Lab) -> None:
    """Twenty seconds a job, or as long as the machine needs for the first steps; both save."""
    waits = (20, 60, 240)
    found = (goes_on(lab, f"long{save_after}", save_after) for save_after in waits)
    run_dir = next((run_dir for run_dir in found if run_dir is not None), None)
    assert run_dir is not None, f"no step within {waits[-1]} s"
    job_id = job_of(lab, run_dir)["job_id"]
    assert job_id == (run_dir.attempt(1).path / "job-id").read_text().strip()
    sh(lab, "ctl", f"qdel {job_id}")
    wait_for_job(lab, run_dir)
    step = assert_stopped(run_dir)
    assert [row["step"] for row in rows_of(run_dir)] == list(range(1, step + 1))


def test_a_job_that_waits_says_why_and_can_be_taken_back(lab: Lab) -> None:
    run_dir = submit(lab, "much", {"cpus_per_node": 64}, steps=6)
    assert "it can never run" in isles(lab, "status", run_dir.name)
    assert "never run" in job_of(lab, run_dir)["reason"]
    isles(lab, "stop", run_dir.name)
    assert job_of(lab, run_dir)["state"] == "ended"
    assert '"state": "stopped"' in isles(lab, "status", run_dir.name, "--json")


@pytest.mark.long
def test_the_form_of_torque(lab: Lab, alone: list[float]) -> None:
    with pbs(lab, NODES, "torque"):
        run_dir = submit(lab, "ppn", {"cpus_per_node": 2, "check": True}, steps=6)
        assert "#PBS -l nodes=2:ppn=2\n" in run_dir.attempt(1).script.read_text()
        assert_trained(lab, run_dir, alone)

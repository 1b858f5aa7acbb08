"""`launcher: slurm` on a real Slurm: submit, follow, restart, requeue, cancel."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, read_rows
from isles.run.restarts import list_restarts, read_last_step
from tests.deadline import DEADLINE_S
from tests.dist.test_same_mathematics import weights_of
from tests.lab.home import ISLES, assert_nothing_left, isles, sh, until, write_run
from tests.lab.hosts import Lab, hosts
from tests.lab.slurm import job_fields, slurm

STEPS = 90
NODES = ("a1", "a2")
SITE = Path(torch.__file__).parents[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with hosts(tmp_path_factory.mktemp("slurm"), len(NODES)) as lab, slurm(lab):
        yield lab


def job_run(lab: Lab, name: str, **more: Any) -> None:
    """A run file /shared/NAME.yaml for two nodes with a rank each."""
    launcher = {"kind": "slurm", "gres": "none", "time": "10m", **more.pop("launcher", {})}
    training = {"max_steps": STEPS, **more.pop("training", {})}
    shape = {"nodes": more.pop("nodes", 2), "gpus_per_node": 1, "device": "cpu"}
    environment = {"variables": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}}
    write_run(
        lab, name, launcher=launcher, training=training, environment=environment, **shape, **more
    )


def start(lab: Lab, name: str, *overrides: str) -> tuple[RunDir, Attempt, str]:
    """Submit a run; its directory, its attempt and its job's number."""
    code, text, _ = isles(lab, "train", f"{name}.yaml", "--detach", *overrides)
    assert code == 0, text
    run_dir = RunDir(lab.shared / "runs" / f"{name}-1")
    attempt = run_dir.last_attempt()
    assert attempt is not None
    launch = read_record(attempt.launch) or {}
    assert launch["launcher"] == "slurm"
    return run_dir, attempt, launch["job_id"]


def outcome_of(attempt: Attempt) -> dict[str, Any]:
    """How an attempt ended, once it has."""
    outcome: dict[str, Any] = until(lambda: read_record(attempt.outcome), f"{attempt.path} ends")
    return outcome


def pause(lab: Lab, attempt: Attempt, step: int, restart: int = 0) -> int:
    """Hold rank 1 once rank 0 has done a step; rank 1's pid on its host."""
    until(lambda: (read_last_step(attempt, restart) or 0) >= step, f"step {step}")
    pid = int((read_record(attempt.rank_record(1)) or {})["pid"])
    sh(lab, "a2", f"kill -STOP {pid}")
    return pid


@pytest.fixture(scope="module")
def whole(lab: Lab) -> RunDir:
    """A run that nothing has disturbed."""
    job_run(lab, "whole")
    code, text, _ = isles(lab, "train", "whole.yaml", "--dry-run")
    assert code == 0, text
    assert not (lab.shared / "runs" / "whole-1").exists()
    run_dir, attempt, job_id = start(lab, "whole")
    # What was shown is what was submitted, and what Slurm has.
    script = attempt.script.read_text()
    assert text.endswith(f"would take this script:\n\n{script}\n")
    assert sh(lab, "ctl", f"scontrol write batch_script {job_id} -") == script
    assert outcome_of(attempt)["state"] == "finished", outcome_of(attempt)
    return run_dir


@pytest.mark.long
def test_two_nodes_train_as_one_machine(lab: Lab, whole: RunDir) -> None:
    losses = [row["loss"] for row in read_rows(whole.metrics) if row["kind"] == "train"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.2
    hosts_of_ranks = [read_record(whole.attempt(1).rank_record(rank)) or {} for rank in (0, 1)]
    assert [record["host"] for record in hosts_of_ranks] == list(NODES)
    text = (lab.shared / "whole.yaml").read_text().replace("whole", "alone", 1)
    (lab.shared / "alone.yaml").write_text(text)
    command = f"cd /shared && exec {ISLES} train alone.yaml 'clusters=[{{gpus_per_node: 1}}]'"
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = lab.run("a1", ["bash", "-c", command], timeout_s=DEADLINE_S, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = weights_of(whole), weights_of(RunDir(lab.shared / "runs" / "alone-1"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5, msg=name)
    _, text, _ = isles(lab, "status", "whole-1")
    assert "finished" in text and "slurm job" in text


def test_a_killed_rank_and_the_time_limit_change_nothing(lab: Lab, whole: RunDir) -> None:
    """A restart inside the allocation; then the signal before the limit, a save, the same job
    queued again; and the same weights in the end, bit for bit."""
    job_run(lab, "torn", launcher={"save_before": "2m"})
    run_dir, attempt, job_id = start(lab, "torn", "checkpoint.every_steps=10")
    pid = pause(lab, attempt, step=12)
    sh(lab, "a2", f"kill -KILL {pid}")
    restart = until(lambda: read_record(attempt.restart(1)), "the ranks are started again")
    assert "rank 1 on a2 was killed by SIGKILL" in restart["text"]
    # The save of step 10 runs beside training, and may not have been done.
    assert restart["count"] == 1 and restart["saved"] in (None, 10, 20, 30)

    pid = pause(lab, attempt, step=40, restart=1)
    hours, minutes, _ = job_fields(lab, job_id)["RunTime"].split(":")
    # At least a minute from now, and the job asked to be told two minutes before: at once.
    limit = 60 * int(hours) + int(minutes) + 2
    sh(lab, "ctl", f"scontrol update jobid={job_id} TimeLimit={limit}")
    until(attempt.stop_request.exists, "Slurm tells the script that the limit is near")
    sh(lab, "a2", f"kill -CONT {pid}")
    restart = until(lambda: read_record(attempt.restart(2)), "saved, to go on")
    assert f"the time limit of Slurm job {job_id} was near" in restart["text"]
    assert restart["reached"] == restart["saved"] >= 40
    waits = until(lambda: job_fields(lab, job_id)["JobState"] == "PENDING", "it is queued again")
    assert waits and not attempt.outcome.exists() and not attempt.stop_request.exists()
    sh(lab, "ctl", f"scontrol update jobid={job_id} TimeLimit=20")
    eligible = job_fields(lab, job_id)["EligibleTime"]
    _, text, _ = isles(lab, "status", "torn-1")
    assert "queued" in text
    assert job_fields(lab, job_id)["EligibleTime"] == eligible, "a look changes nothing"
    code, text, _ = isles(lab, "train", "torn.yaml", "checkpoint.every_steps=10")
    # Who asks for the run need not wait for Slurm's two minutes.
    assert code == 1 and f"queued again as Slurm job {job_id}" in text

    outcome = outcome_of(attempt)
    assert (outcome["state"], outcome["step"]) == ("finished", STEPS), outcome
    assert job_fields(lab, job_id)["Restarts"] == "1"
    ours, theirs = weights_of(run_dir), weights_of(whole)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.long
def test_preemption_changes_nothing(lab: Lab, whole: RunDir) -> None:
    """A job that comes first: a save, the same job queued again, the same weights in the end."""
    job_run(lab, "taken")
    run_dir, attempt, job_id = start(lab, "taken", "checkpoint.every_steps=10")
    pid = pause(lab, attempt, step=20)
    other = sh(lab, "ctl", "sbatch --parsable -p high --exclusive -N 2 -o /dev/null --wrap true")
    until(lambda: job_fields(lab, job_id)["PreemptTime"] != "None", "another job wants its nodes")
    # Slurm sends SIGCONT itself as it warns: the rank may have saved and gone by now.
    sh(lab, "a2", f"kill -CONT {pid} || true")
    restart = until(lambda: read_record(attempt.restart(1)), "saved, to go on")
    assert f"another job took the nodes of Slurm job {job_id}" in restart["text"]
    assert restart["reached"] == restart["saved"] >= 20
    until(lambda: job_fields(lab, job_id)["JobState"] == "PENDING", "it is queued again")
    until(lambda: job_fields(lab, other.strip())["JobState"] == "COMPLETED", "the other has run")
    isles(lab, "train", "taken.yaml", "checkpoint.every_steps=10")

    outcome = outcome_of(attempt)
    assert (outcome["state"], outcome["step"]) == ("finished", STEPS), outcome
    assert job_fields(lab, job_id)["Restarts"] == "1"
    ours, theirs = weights_of(run_dir), weights_of(whole)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.long
def test_a_node_that_is_lost_is_named_and_done_without(lab: Lab) -> None:
    job_run(lab, "elastic", nodes="1:2", training={"max_steps": 100_000})
    _, attempt, job_id = start(lab, "elastic")
    until(lambda: (read_last_step(attempt, 0) or 0) >= 3, "step 3")
    agent = (read_record(attempt.node_record(1)) or {})["pid"]
    sh(lab, "a2", f"kill -KILL {agent}")
    until(lambda: read_last_step(attempt, 1), "the other goes on")
    (restart,) = list_restarts(attempt)
    assert "node 1 (a2" in restart.why and "is gone" in restart.why
    assert (restart.world_size, restart.is_counted) == (1, False)
    assert job_fields(lab, job_id)["JobState"] == "RUNNING"
    _, text, _ = isles(lab, "status", "elastic-1")
    assert "is lost: its agent has ended without a word" in text, text
    code, text, _ = isles(lab, "stop", "elastic-1")
    assert code == 0, text
    assert_nothing_left(lab)


@pytest.mark.long
def test_a_cancelled_job_saves_and_is_not_queued_again(lab: Lab) -> None:
    """FSDP this time; `scancel` by hand, then `isles train` goes on, and `isles stop` stops it."""
    job_run(lab, "fsdp", training={"max_steps": 100_000})
    path = lab.shared / "fsdp.yaml"
    path.write_text(path.read_text().replace("kind: ddp", "kind: fsdp"))
    _, attempt, job_id = start(lab, "fsdp")
    until(lambda: (read_last_step(attempt, 0) or 0) >= 5, "step 5")
    sh(lab, "ctl", f"scancel {job_id}")
    until(lambda: job_fields(lab, job_id)["JobState"] == "CANCELLED", "the job is over")
    _, text, _ = isles(lab, "status", "fsdp-1")
    assert "stopped" in text, text
    outcome = outcome_of(attempt)
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", 85), outcome
    assert outcome["step"] >= 5
    assert_nothing_left(lab)

    run_dir, attempt, job_id = start(lab, "fsdp")
    assert attempt.number == 2
    until(lambda: (read_last_step(attempt, 0) or 0) > outcome["step"], "it goes on")
    code, text, _ = isles(lab, "stop", "fsdp-1")
    assert code == 0 and "stopped at step" in text, text
    until(lambda: job_fields(lab, job_id)["JobState"] == "FAILED", "the job is over")
    assert job_fields(lab, job_id)["ExitCode"] == "85:0"
    losses = [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert_nothing_left(lab)


SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "ISLES_RUN_DIR")
place = {name: os.environ[name] for name in names} | {"host": os.uname().nodename}
with open(f"place-{place['RANK']}.json", "w") as stream:
    json.dump([place, sys.argv[1:]], stream)
"""


@pytest.mark.long
def test_a_script_of_the_users_own(lab: Lab) -> None:
    """And a folder whose name means something else to sbatch, to srun and to bash."""
    (lab.shared / "place.py").write_text(SCRIPT)
    text = """
name: mine
output_dir: "o ut#1%j'q"
training: {script: place.py, script_args: [--epochs, 2]}
clusters:
  - launcher: {kind: slurm, gres: none, check: true}
    nodes: 2
    gpus_per_node: 1
    device: cpu
    workdir: /shared
"""
    (lab.shared / "mine.yaml").write_text(text)
    code, text, _ = isles(lab, "train", "mine.yaml", "--detach")
    assert code == 0, text
    attempt = RunDir(lab.shared / "o ut#1%j'q" / "mine-1").attempt(1)
    outcome = outcome_of(attempt)
    assert outcome["state"] == "finished", outcome
    job_id = (read_record(attempt.launch) or {})["job_id"]
    assert (attempt.path / f"slurm-{job_id}.out").stat().st_size
    assert "starting rank 1 of 2" in (attempt.path / "node-1.log").read_text()
    for rank, host in enumerate(NODES):
        place, arguments = json.loads((lab.shared / f"place-{rank}.json").read_text())
        assert (place["RANK"], place["GROUP_RANK"], place["host"]) == (str(rank), str(rank), host)
        assert (place["WORLD_SIZE"], place["LOCAL_RANK"]) == ("2", "0")
        assert place["MASTER_ADDR"] == lab.address("a1")
        assert arguments == ["--epochs", "2"]
    found = read_record(attempt.findings) or {}
    assert found["hosts"] == list(NODES) and found["summary"]["errors"] == 0, found


@pytest.mark.long
def test_a_job_on_unfit_nodes_does_not_start(lab: Lab) -> None:
    metadata = next(SITE.glob("torch-*.dist-info")) / "METADATA"
    sh(lab, "a2", f"sed -i.kept 's/^Version: .*/Version: 2.11.0/' {metadata}")
    job_run(lab, "unfit", launcher={"check": True})
    try:
        _, attempt, _ = start(lab, "unfit")
        outcome = outcome_of(attempt)
    finally:
        sh(lab, "a2", f"mv {metadata}.kept {metadata}")
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 2), outcome
    assert "2.11.0" in outcome["reason"] and "a2: version.torch" in outcome["error"]["where"]
    assert not attempt.rank_record(0).exists()


@pytest.mark.long
def test_a_rendered_script_trains_by_sbatch_alone(lab: Lab) -> None:
    job_run(lab, "rendered", training={"max_steps": 8})
    words = ("--to", "sbatch", "-o", "rendered.sh")
    code, text, _ = isles(lab, "render", "rendered.yaml", *words)
    assert code == 0, text
    # The nodes have the trainer, and no command isles.
    line = "cd /shared && env PATH=/usr/bin:/bin sbatch --parsable rendered.sh"
    job_id = sh(lab, "ctl", line).strip()
    ended = ("COMPLETED", "FAILED", "CANCELLED")
    state = until(
        lambda: (s := job_fields(lab, job_id)["JobState"]) in ended and s, "the job is over"
    )
    assert state == "COMPLETED", (lab.shared / f"slurm-{job_id}.out").read_text()
    run_dir = RunDir(lab.shared / "runs" / "rendered-1")
    losses = [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert len(losses) == 8
    assert (read_record(run_dir.attempt(1).outcome) or {})["state"] == "finished"


@pytest.mark.long
def test_from_a_laptop_that_is_closed(lab: Lab) -> None:
    """ctl is the laptop, and a1 the login node: start, lose the laptop, find the run again."""
    job_run(lab, "afar", launcher={"login": "a1"}, training={"max_steps": 100_000})
    path = lab.shared / "afar.yaml"
    path.write_text(path.read_text().replace("output_dir: /shared/runs", "output_dir: runs"))
    sh(lab, "ctl", f"mkdir -p /root/home && mv /shared/{path.name} /root/home")

    def typed(*words: str) -> str:
        return sh(lab, "ctl", f"cd /root/home && {shlex.join((ISLES, *words))} 2>&1")

    code = f"cd /root/home && exec {ISLES} train afar.yaml"
    laptop = lab.popen("ctl", ["bash", "-c", code])
    run_dir = RunDir(lab.shared / "runs" / "afar-1")
    until(lambda: (a := run_dir.last_attempt()) and (read_last_step(a, 0) or 0) >= 3, "step 3")
    sh(lab, "ctl", "pkill -KILL -f '[i]sles train afar.yaml'; pkill -KILL -x ssh || true")
    laptop.communicate(timeout=DEADLINE_S)
    attempt = run_dir.attempt(1)
    reached = read_last_step(attempt, 0) or 0
    until(lambda: (read_last_step(attempt, 0) or 0) > reached + 2, "it goes on without the laptop")

    assert not (lab.root("ctl") / "root/home/runs/afar-1").exists()
    text = typed("status", "afar-1")
    assert "running" in text and "on a[1-2]" in text, text
    assert "starting rank 1 of 2" in typed("logs", "afar-1", "-n", "200")
    text = typed("stop", "afar-1")
    assert "stopped at step" in text, text
    assert outcome_of(attempt)["exit_code"] == 85
    assert_nothing_left(lab)


@pytest.mark.long
def test_a_held_job_stays_held(lab: Lab) -> None:
    job_run(lab, "held", launcher={"extra": ["--hold", '--comment="a #b"']})
    _, _, job_id = start(lab, "held")
    assert "Comment=a #b" in sh(lab, "ctl", f"scontrol show job {job_id}")
    _, shown, _ = isles(lab, "status", "held-1")
    assert "held by its user" in shown
    assert job_fields(lab, job_id)["Reason"] == "JobHeldUser", "a look changes nothing"
    code, text, _ = isles(lab, "stop", "held-1")
    assert code == 0, text


def test_a_job_that_waits_says_why(lab: Lab) -> None:
    sh(lab, "ctl", "scontrol update nodename=a2 state=drain reason='a bad disk'")
    try:
        job_run(lab, "waits")
        _, attempt, job_id = start(lab, "waits")

        def status() -> str:
            _, text, _ = isles(lab, "status", "waits-1")
            return text if "a2 is drained (a bad disk)" in text else ""

        assert "queued" in until(status, "the drained node is named")
        code, text, _ = isles(lab, "stop", "waits-1")
        assert code == 0, text
        assert outcome_of(attempt)["state"] == "stopped"
        assert job_fields(lab, job_id)["JobState"] == "CANCELLED"
    finally:
        sh(lab, "ctl", "scontrol update nodename=a2 state=resume")


@pytest.mark.parametrize(
    ("override", "key", "fix"),
    [
        ("partition=mian", "partition", "did you mean main? There are: main, high"),
        ("constraint=ib", "constraint", "sinfo -o '%n %f'"),
        ("memory_per_node=900G", "memory_per_node", "sinfo -o '%n %m'"),
        ("nodelist=a9", "nodelist", "sinfo -N"),
        ("extra=[--array=1-3]", "extra", "an `isles train` of its own"),
        ("extra=[--nope]", "extra", "sbatch --help"),
        ("bin_path=/opt/slurm/bin", "bin_path", "start from a login node"),
    ],
)
def test_what_slurm_refuses_is_said_with_its_key(
    lab: Lab, override: str, key: str, fix: str
) -> None:
    job_run(lab, "refused")
    code, text, _ = isles(lab, "train", "refused.yaml", f"clusters.0.launcher.{override}")
    assert code in (1, 2), text
    assert f"clusters.0.launcher.{key}" in text and fix in text, text
    assert not (lab.shared / "runs" / "refused-1").exists()


def test_inside_a_job_it_says_what_to_do(lab: Lab) -> None:
    job_run(lab, "inside")
    text = sh(
        lab,
        "ctl",
        f"cd /shared && SLURM_JOB_ID=7 {ISLES} train inside.yaml 2>&1 || true",
    )
    assert "this shell is in Slurm job 7" in text and "{kind: local}" in text

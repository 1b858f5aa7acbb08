"""`launcher: slurm` on a real Slurm: submit, follow, restart, requeue, cancel."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.restarts import list_restarts, read_last_step
from tests.deadline import DEADLINE_S
from tests.dist.test_same_mathematics import weights_of
from tests.lab.home import (
    ISLES,
    PLACE,
    QUOTED_ISLES,
    assert_nothing_left,
    assert_places,
    assert_stopped,
    has_done,
    isles,
    other_torch,
    outcome_of,
    sh,
    signal_all,
    undone,
    until,
    until_step,
    write_run,
)
from tests.lab.hosts import Lab
from tests.lab.slurm import job_fields, slurm, wait_for_job
from tests.runs import losses_of, rows_of

STEPS = 90
NODES = ("a1", "a2")
NUM_HOSTS = len(NODES)


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Iterator[Lab]:
    with slurm(lab):
        yield lab


def job_run(lab: Lab, name: str, **more: Any) -> None:
    """A run file /shared/NAME.yaml for two nodes with a rank each."""
    launcher = {"kind": "slurm", "gres": "none", "time": "10m", **more.pop("launcher", {})}
    training = {"max_steps": STEPS, **more.pop("training", {})}
    shape = {"nodes": more.pop("nodes", 2), "gpus_per_node": 1, "device": "cpu"}
    shape["environment"] = {"variables": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}}
    write_run(lab, name, launcher=launcher, training=training, **shape, **more)


def start(lab: Lab, name: str, *overrides: str, **more: Any) -> tuple[RunDir, Attempt, str]:
    """Submit such a run; its directory, its attempt and its job's number."""
    job_run(lab, name, **more)
    isles(lab, "train", f"{name}.yaml", "--detach", *overrides)
    run_dir = RunDir(lab.shared / "runs" / f"{name}-1")
    attempt = run_dir.last_attempt()
    assert attempt is not None
    launch = read_record(attempt.launch) or {}
    assert launch["launcher"] == "slurm"
    return run_dir, attempt, launch["job_id"]


def pause(lab: Lab, attempt: Attempt, step: int, restart: int = 0) -> int:
    """Hold rank 1 once rank 0 has done a step; rank 1's pid on its host."""
    until_step(attempt, step, restart)
    pid = int((read_record(attempt.rank_record(1)) or {})["pid"])
    sh(lab, "a2", f"kill -STOP {pid}")
    return pid


def assert_finished_as(whole: RunDir, lab: Lab, run_dir: RunDir, job_id: str) -> None:
    """A job that was queued again once has trained the same weights, bit for bit."""
    outcome = outcome_of(run_dir.attempt(1))
    assert (outcome["state"], outcome["step"]) == ("finished", STEPS), outcome
    assert job_fields(lab, job_id)["Restarts"] == "1"
    torch.testing.assert_close(weights_of(run_dir), weights_of(whole), rtol=0, atol=0)


@pytest.fixture(scope="module")
def whole(lab: Lab) -> RunDir:
    """A run that nothing has disturbed."""
    job_run(lab, "whole")
    text = isles(lab, "train", "whole.yaml", "--dry-run")
    assert not (lab.shared / "runs" / "whole-1").exists()
    run_dir, attempt, job_id = start(lab, "whole")
    # What was shown is what was submitted, and what Slurm has.
    script = attempt.script.read_text()
    assert text.endswith(f"would get this script:\n\n{script}\n")
    assert sh(lab, "ctl", f"scontrol write batch_script {job_id} -") == script
    assert outcome_of(attempt)["state"] == "finished"
    return run_dir


@pytest.mark.long
def test_a_second_job_trains_nothing_and_a_stop_during_the_setup_is_a_stop(lab: Lab) -> None:
    run_dir, attempt, job_id = start(lab, "twice", training={"max_steps": 10**6})
    until_step(attempt, 2)
    again = sh(lab, "ctl", f"cd /shared; sbatch --parsable {attempt.script}").strip()
    output = attempt.path / f"slurm-{again}.out"
    until(lambda: output.exists() and "ends" in output.read_text(), f"job {again} ends")
    assert f"Slurm job {again} ends because this run is job {job_id}'s" in output.read_text()
    isles(lab, "stop", "twice")
    step = assert_stopped(run_dir)
    assert [row["step"] for row in rows_of(run_dir)] == list(range(1, step + 1))
    run_dir, attempt, job_id = start(lab, "early", "clusters.0.environment.setup=[sleep 6]")
    until(lambda: job_fields(lab, job_id)["JobState"] == "RUNNING", f"job {job_id} runs")
    assert "has ended: stopped" in isles(lab, "stop", "early")
    assert outcome_of(attempt)["state"] == "stopped"


@pytest.mark.long
def test_two_nodes_train_as_one_machine(lab: Lab, whole: RunDir) -> None:
    losses = losses_of(whole)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.2
    ranks = [read_record(whole.attempt(1).rank_record(rank)) or {} for rank in (0, 1)]
    assert [record["host"] for record in ranks] == list(NODES)
    words = "train whole.yaml name=alone 'clusters=[{gpus_per_node: 1}]'"
    sh(lab, "a1", f"cd /shared; export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1; {QUOTED_ISLES} {words}")
    alone = RunDir(lab.shared / "runs" / "alone-1")
    torch.testing.assert_close(weights_of(whole), weights_of(alone), rtol=1e-3, atol=1e-5)
    text = isles(lab, "status", "whole-1")
    assert "finished" in text and "slurm job" in text


def test_a_killed_rank_and_the_time_limit_change_nothing(lab: Lab, whole: RunDir) -> None:
    """A restart inside the allocation; then the signal before the limit, a save, the same job
    queued again; and the same weights in the end, bit for bit."""
    saves, launcher = "checkpoint.every_steps=10", {"save_before": "2m"}
    run_dir, attempt, job_id = start(lab, "torn", saves, launcher=launcher)
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
    wait_for_job(lab, job_id, "PENDING")
    assert not attempt.outcome.exists() and not attempt.stop_request.exists()
    sh(lab, "ctl", f"scontrol update jobid={job_id} TimeLimit=20")
    eligible = job_fields(lab, job_id)["EligibleTime"]
    assert "queued" in isles(lab, "status", "torn-1")
    assert job_fields(lab, job_id)["EligibleTime"] == eligible, "a look changes nothing"
    text = isles(lab, "train", "torn.yaml", saves)
    # Who asks for the run need not wait for Slurm's two minutes.
    assert f"queued again as Slurm job {job_id}" in text
    assert_finished_as(whole, lab, run_dir, job_id)


@pytest.mark.long
def test_preemption_changes_nothing(lab: Lab, whole: RunDir) -> None:
    """A job that comes first: a save, the same job queued again, the same weights in the end."""
    run_dir, attempt, job_id = start(lab, "taken", "checkpoint.every_steps=10")
    pid = pause(lab, attempt, step=20)
    other = sh(lab, "ctl", "sbatch --parsable -p high --exclusive -N 2 -o /dev/null --wrap true")
    until(lambda: job_fields(lab, job_id)["PreemptTime"] != "None", "another job wants its nodes")
    # Slurm sends SIGCONT itself as it warns: the rank may have saved and gone by now.
    sh(lab, "a2", f"kill -CONT {pid} || true")
    restart = until(lambda: read_record(attempt.restart(1)), "saved, to go on")
    assert f"another job took the nodes of Slurm job {job_id}" in restart["text"]
    assert restart["reached"] == restart["saved"] >= 20
    wait_for_job(lab, job_id, "PENDING")
    wait_for_job(lab, other.strip(), "COMPLETED")
    isles(lab, "train", "taken.yaml", "checkpoint.every_steps=10", expected=None)
    assert_finished_as(whole, lab, run_dir, job_id)


@pytest.mark.long
def test_a_lost_node_is_done_without_and_a_canceled_job_saves(lab: Lab) -> None:
    """`scancel` queues nothing again; `isles train` goes on, and `isles stop` stops it."""
    shape: dict[str, Any] = {"nodes": "1:2", "training": {"max_steps": 100_000}}
    run_dir, attempt, job_id = start(lab, "elastic", **shape)
    until_step(attempt, 3)
    agent = (read_record(attempt.node_record(1)) or {})["pid"]
    sh(lab, "a2", f"kill -KILL {agent}")
    until(lambda: read_last_step(attempt, 1), "the other goes on")
    (restart,) = list_restarts(attempt)
    assert "node 1 (a2" in restart.why and "is gone" in restart.why
    assert (restart.world_size, restart.is_counted) == (1, False)
    assert job_fields(lab, job_id)["JobState"] == "RUNNING"
    text = isles(lab, "status", "elastic-1")
    assert "is lost: its agent exited without notice" in text, text

    sh(lab, "ctl", f"scancel {job_id}")
    wait_for_job(lab, job_id, "CANCELLED")
    assert "stopped" in isles(lab, "status", "elastic-1")
    saved = assert_stopped(run_dir)
    assert saved >= 3
    assert_nothing_left(lab, NODES)

    run_dir, attempt, job_id = start(lab, "elastic", **shape)
    assert attempt.number == 2
    until_step(attempt, saved + 1)
    assert "stopped at step" in isles(lab, "stop", "elastic-1")
    wait_for_job(lab, job_id, "FAILED")
    assert job_fields(lab, job_id)["ExitCode"] == "85:0"
    assert_nothing_left(lab, NODES)


@pytest.mark.long
def test_a_script_of_the_users_own(lab: Lab) -> None:
    """And a folder whose name means something else to sbatch, to srun and to bash."""
    (lab.shared / "place.py").write_text(PLACE)
    training = {"script": "place.py", "script_args": ["--epochs", 2]}
    job_run(lab, "mine", output_dir="o ut#1%j'q", training=training, launcher={"check": True})
    isles(lab, "train", "mine.yaml", "--detach")
    attempt = RunDir(lab.shared / "o ut#1%j'q" / "mine-1").attempt(1)
    assert outcome_of(attempt)["state"] == "finished"
    job_id = (read_record(attempt.launch) or {})["job_id"]
    assert (attempt.path / f"slurm-{job_id}.out").stat().st_size
    assert "starting rank 1 of 2" in (attempt.path / "node-1.log").read_text()
    assert_places(lab, lab.shared, "--epochs", "2")
    found = read_record(attempt.findings) or {}
    assert found["hosts"] == list(NODES) and found["summary"]["errors"] == 0, found


@pytest.mark.long
def test_a_job_on_unfit_nodes_does_not_start(lab: Lab) -> None:
    with other_torch(lab, "a2"):
        _, attempt, _ = start(lab, "unfit", launcher={"check": True})
        outcome = outcome_of(attempt)
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 2), outcome
    assert "2.11.0" in outcome["reason"] and "a2: version.torch" in outcome["error"]["where"]
    assert not attempt.rank_record(0).exists()


@pytest.mark.long
def test_a_rendered_script_trains_by_sbatch_alone(lab: Lab) -> None:
    job_run(lab, "rendered", training={"max_steps": 8})
    isles(lab, "render", "rendered.yaml", "--to", "sbatch", "-o", "rendered.sh")
    # The nodes have the trainer, and no command isles.
    line = "cd /shared && env PATH=/usr/bin:/bin sbatch --parsable rendered.sh"
    job_id = sh(lab, "ctl", line).strip()
    state = wait_for_job(lab, job_id)
    assert state == "COMPLETED", (lab.shared / f"slurm-{job_id}.out").read_text()
    run_dir = RunDir(lab.shared / "runs" / "rendered-1")
    assert len(losses_of(run_dir)) == 8
    assert outcome_of(run_dir.attempt(1))["state"] == "finished"


@pytest.mark.long
def test_from_a_laptop_that_is_closed(lab: Lab) -> None:
    """ctl is the laptop, and a1 the login node: start, lose the laptop, find the run again."""
    login, long = {"login": "a1"}, {"max_steps": 100_000}
    job_run(lab, "afar", launcher=login, training=long, output_dir="runs")
    sh(lab, "ctl", "mkdir -p /root/home && mv /shared/afar.yaml /root/home")

    def typed(words: str) -> str:
        return sh(lab, "ctl", f"exec 2>&1; cd /root/home; {QUOTED_ISLES} {words}")

    wrong = typed("train afar.yaml data.sources.0.path=none.txt || [ $? = 1 ]")
    assert "none.txt" in wrong
    assert "/tmp/isles-login-" not in wrong, "the file's own name, not that of its copy"
    assert "#SBATCH --nodes=2" in typed("train afar.yaml --dry-run")

    line = f"cd /root/home && exec {QUOTED_ISLES} train afar.yaml"
    laptop = lab.popen("ctl", ["bash", "-c", line])
    run_dir = RunDir(lab.shared / "runs" / "afar-1")
    until(lambda: (a := run_dir.last_attempt()) and has_done(a, 3), "step 3")
    signal_all(lab, "ctl", signal.SIGKILL, "train", "afar.yaml")
    sh(lab, "ctl", "pkill -KILL -x ssh || true")
    laptop.communicate(timeout=DEADLINE_S)
    attempt = run_dir.attempt(1)
    reached = read_last_step(attempt, 0) or 0
    until_step(attempt, reached + 3)

    assert not (lab.root("ctl") / "root/home/runs/afar-1").exists()
    text = typed("status afar-1")
    assert "running" in text and "on a[1-2]" in text, text
    assert "starting rank 1 of 2" in typed("logs afar-1 -n 200")
    text = typed("stop afar-1")
    assert "stopped at step" in text, text
    assert_stopped(run_dir)
    assert_nothing_left(lab, NODES)

    # Ctrl+C takes a job that waits out of the queue.
    held = "--resume no 'clusters.0.launcher.extra=[--hold]'"
    laptop = lab.popen("ctl", ["bash", "-c", f"{line} {held} >held.log 2>&1"])
    log = lab.root("ctl") / "root/home/held.log"
    until(lambda: log.exists() and "queued: " in log.read_text(), "it is followed in the queue")
    assert "afar-2@a1  queued" in typed("status")
    signal_all(lab, "ctl", signal.SIGINT, "train", "afar.yaml")
    laptop.wait(DEADLINE_S)
    launch = read_record(RunDir(lab.shared / "runs/afar-2").attempt(1).launch) or {}
    job_id = str(launch["job_id"])
    assert f"taking Slurm job {job_id} out of the queue" in log.read_text()
    assert "afar-2 stopped" in log.read_text()
    wait_for_job(lab, job_id, "CANCELLED")
    assert not list((lab.root("a1") / "tmp").glob("isles-login-*"))


@pytest.mark.long
def test_a_job_that_waits_says_why(lab: Lab) -> None:
    _, _, job_id = start(lab, "held", launcher={"extra": ["--hold", '--comment="a #b"']})
    assert "Comment=a #b" in sh(lab, "ctl", f"scontrol show job {job_id}")
    assert "held by its user" in isles(lab, "status", "held-1")
    assert job_fields(lab, job_id)["Reason"] == "JobHeldUser", "a look changes nothing"
    isles(lab, "stop", "held-1")

    drain = "scontrol update nodename=a2 state=drain reason='a bad disk'"
    with undone(lab, "ctl", drain, "scontrol update nodename=a2 state=resume"):
        _, attempt, job_id = start(lab, "waits")

        def names_the_node() -> bool:
            text = isles(lab, "status", "waits-1")
            return "a2 is drained (a bad disk)" in text and "queued" in text

        until(names_the_node, "the drained node is named")
        isles(lab, "stop", "waits-1")
        assert outcome_of(attempt)["state"] == "stopped"
        assert job_fields(lab, job_id)["JobState"] == "CANCELLED"


def test_what_slurm_refuses_is_said_with_its_key(lab: Lab) -> None:
    job_run(lab, "refused")
    for override, fix in (
        ("partition=mian", "did you mean main? There are: main, high"),
        ("constraint=ib", "sinfo -o '%n %f'"),
        ("memory_per_node=900G", "sinfo -o '%n %m'"),
        ("nodelist=a9", "sinfo -N"),
        ("extra=[--array=1-3]", "a separate `isles train`"),
        ("extra=[--signal=USR2@60]", "launcher.save_before instead"),
        ("extra=[--exclusive -oout]", "output with `isles logs`"),
        ('extra=["--comment=it\'s"]', "as in bash"),
        ("extra=[--nope]", "sbatch --help"),
        ("bin_path=/opt/slurm/bin", "start from a login node"),
    ):
        key = f"clusters.0.launcher.{override}"
        text = isles(lab, "train", "refused.yaml", key, expected=None)
        assert key.partition("=")[0] in text and fix in text, text
    text = sh(
        lab, "ctl", f"cd /shared; SLURM_JOB_ID=7 {QUOTED_ISLES} train refused.yaml 2>&1 || true"
    )
    assert "this shell is inside Slurm job 7" in text and "{kind: local}" in text
    assert not (lab.shared / "runs" / "refused-1").exists()


@pytest.mark.long
def test_the_commands_for_the_nodes_of_a_job_that_one_has_work(lab: Lab) -> None:
    """They are typed as they are printed, in the shell of salloc, which stays on the login node."""
    environment = {"venv": str(Path(ISLES).parents[1]), "variables": {"HF_HUB_OFFLINE": "1"}}
    job_run(lab, "held", training={"max_steps": 4}, launcher={"cpus_per_node": 1})
    path = lab.shared / "held.yaml"
    record = yaml.safe_load(path.read_text())
    record["clusters"][0]["environment"] = environment
    path.write_text(yaml.safe_dump(record))
    names = f"PATH={Path(ISLES).parent}:$PATH"
    typed = "isles train held.yaml"
    text = sh(lab, "ctl", f"cd /shared; {names} salloc -N2 {typed} 2>&1 || true")
    whole, one, _ = re.findall(r"`([^`]+)`", text)
    assert whole.startswith("isles render") and one.startswith("srun")
    for number, command in enumerate((whole, one), 1):
        shell = f"{command} 2>&1"
        text = sh(lab, "ctl", f"cd /shared; {names} salloc -N2 bash -c {shlex.quote(shell)}")
        run_dir = RunDir(lab.shared / "runs" / f"held-{number}")
        assert outcome_of(run_dir.last_attempt() or run_dir.attempt(1))["state"] == "finished", text
        ranks = [read_record(path) or {} for path in run_dir.attempt(1).path.glob("rank-*.json")]
        assert len({rank["host"] for rank in ranks}) == (2 if number == 1 else 1)


@pytest.mark.long
def test_ranks_have_the_threads_that_the_job_gave_them(lab: Lab) -> None:
    """The nodes have two cores and bind none."""
    job_run(lab, "threads", training={"max_steps": 10**6}, launcher={"cpus_per_node": 1})
    path = lab.shared / "threads.yaml"
    record = yaml.safe_load(path.read_text())
    del record["clusters"][0]["environment"]["variables"]["OMP_NUM_THREADS"]
    path.write_text(yaml.safe_dump(record))
    isles(lab, "train", "threads.yaml", "--detach")
    attempt = RunDir(lab.shared / "runs" / "threads-1").attempt(1)
    until_step(attempt, 2)
    for rank, host in enumerate(NODES):
        pid = int((read_record(attempt.rank_record(rank)) or {})["pid"])
        environ = sh(lab, host, f"tr '\\0' '\\n' </proc/{pid}/environ")
        assert "OMP_NUM_THREADS=1\n" in environ
    assert "threads=1" in attempt.rank_log(0).read_text()
    isles(lab, "stop", "threads")

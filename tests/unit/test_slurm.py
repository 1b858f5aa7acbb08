"""The launcher slurm without a Slurm: its script word for word, what it does when ranks end, and
what Slurm's answers mean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.launch.queue.script import JobText, clock, job_script, rendered_script
from isles.launch.queue.slurm import pending
from isles.launch.queue.status import read_job, refresh
from isles.run.begin import write_launch
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.golden import check_golden

RUN = """\
name: llama-1b
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 32}
clusters:
  - launcher:
      kind: slurm
      partition: gpu
      account: physics
      qos: long
      constraint: "a100|h100"
      time: 1d
      save_before: 10m
      memory_per_node: 200G
      cpus_per_node: 28
      extra: [--mail-type=END]
    nodes: 2
    gpus_per_node: 4
    workdir: /home/me/train
    environment: {conda: train, modules: [cuda/12.8], variables: {HF_HOME: /scratch/hf}}
    network: {profile: infiniband}
"""
COMMAND = ["-m", "isles.train", "run.yaml"]
RUN_DIR = "/home/me/train/runs/llama-1b-1"
OWN = f"name: mine\ntraining: {{script: my.py}}\n{RUN[RUN.index('clusters:') :]}"
"""With a script of the user's own."""


def make_script(
    tmp_path: Path, *overrides: str, run_dir: str | None = RUN_DIR, device: str = "cuda"
) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    config = load_run_file(path, overrides).config
    cluster = config.clusters[0]
    assert isinstance(cluster.launcher, SlurmLauncherConfig)
    assert isinstance(cluster.gpus_per_node, int)
    job = JobText(
        launcher=cluster.launcher,
        nodes=cluster.max_nodes,
        nproc=cluster.gpus_per_node,
        device=device,
        workdir=cluster.workdir or "/home/me/train",
        run_dir=run_dir,
        attempt=1 if run_dir is not None else 0,
    )
    return rendered_script(config, job, COMMAND) if run_dir is None else job_script(config, job)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("slurm-two-nodes.sh", ()),
        (
            "slurm-one-node.sh",
            (
                "clusters.0.nodes=1",
                "clusters.0.environment={venv: /home/me/venv}",
                "clusters.0.launcher={kind: slurm, requeue: false, gres: 'gpu:a100:4'}",
            ),
        ),
        ("slurm-interface.sh", ("clusters.0.network={interface: ib0, port: 31000}",)),
    ],
)
def test_the_script_word_for_word(tmp_path: Path, name: str, overrides: tuple[str, ...]) -> None:
    check_golden(name, make_script(tmp_path, *overrides))


def test_the_script_without_a_run_directory(tmp_path: Path) -> None:
    check_golden("slurm-alone.sh", make_script(tmp_path, run_dir=None))


def test_times_are_never_shorter_than_asked() -> None:
    assert clock(60) == "00:01:00"
    assert clock(3599.5) == "01:00:00"
    assert clock(36 * 3600 + 61) == "36:01:01"


@each(
    ("reason", "meaning", "fix"),
    [
        ("Resources", "waiting for nodes that are free", ""),
        ("BeginTime", "not to start before its time", "scontrol update jobid=7 StartTime=now"),
        ("ReqNodeNotAvail,_UnavailableNodes:a[1-2]", "nodes that it needs", "sinfo -R"),
        ("QOSMaxJobsPerUserLimit", "a limit of the qos is reached: jobs of one user", "squeue"),
        ("QOSMaxGRESPerUser", "a limit of the qos is reached: GPUs", "wait"),
        ("AssocGrpGRES", "a limit of the account is reached: GPUs", "wait"),
        ("AssocGrpCPURunMinutesLimit", "a limit of the account is reached: minutes", "wait"),
        ("PartitionTimeLimit", "its time limit is longer", "a shorter `time`"),
        ("JobHeldUser", "held by its user", "scontrol release 7"),
        ("Some_New_Reason", "Some New Reason", ""),
    ],
)
def test_reasons_for_waiting_in_words(reason: str, meaning: str, fix: str) -> None:
    words, what_to_do = pending(reason, "7")
    assert meaning in words and fix in what_to_do


class Job:
    """A run directory with a job, and Slurm's commands as small programs."""

    def __init__(self, folder: Path, *overrides: str, text: str = RUN) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        run_file = folder / "run.yaml"
        run_file.write_text(text)
        loaded = load_run_file(
            run_file,
            [
                "clusters.0.workdir=null",
                "clusters.0.environment={}",
                "clusters.0.nodes=1",
                "clusters.0.device=cpu",
                *overrides,
            ],
        )
        self.config = loaded.config
        resolved = resolve(loaded, nproc=(4,), device="cpu")
        self.run_dir = RunDir(folder / "runs" / "llama-1b-1")
        self.attempt: Attempt = self.run_dir.attempt(1)
        self.attempt.path.mkdir(parents=True)
        self.run_dir.resolved.write_text(dump_resolved(resolved))
        write_launch(
            self.attempt,
            None,
            launcher="slurm",
            job_id="7",
            world_size=4,
            device="cpu",
            command=("sbatch",),
            bin_path=str(self.bin),
        )
        for name in ("scontrol", "sbatch", "scancel", "sinfo", "srun", "torchrun", "sacct"):
            self.program(name, "exit 1")

    def program(self, name: str, text: str) -> None:
        """A command of this name: lines of bash, after its call is noted."""
        path = self.bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.calls}\n{text}\n')
        path.chmod(0o755)

    def ask(self) -> Any:
        """What the queue says now."""
        return refresh(self.run_dir, self.attempt, max_age_s=0.0)

    def rendered(self, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the script that needs no isles to its end under plain bash."""
        launcher = self.config.clusters[0].launcher
        assert isinstance(launcher, SlurmLauncherConfig)
        job = JobText(launcher, 1, 4, "cpu", str(folder))
        self.attempt.script.write_text(rendered_script(self.config, job, COMMAND))
        self.program("srun", 'SLURM_NODEID=0 exec bash -c "${@: -1}"')
        search = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        # The folder of this Python comes first in the script: torchrun must be found before it.
        text = self.attempt.script.read_text().replace(
            "set -uo pipefail", f'export PATH={self.bin}:"$PATH"\nset -uo pipefail'
        )
        return subprocess.run(
            ["bash", "-c", text],
            env={
                **os.environ,
                "PATH": search,
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "a1",
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


PENDING = (
    "JobId=7 JobName=a name UserId=me(1) JobState=PENDING Reason={reason} Requeue=1 Restarts=0 "
    "TimeLimit=1-00:00:00 StartTime=Unknown Partition=gpu NodeList= Command=/x/job.sh"
)


def test_the_queue_is_asked_and_its_words_are_kept(job: Job) -> None:
    reason = "ReqNodeNotAvail,_UnavailableNodes:a[1-2]"
    job.program("scontrol", f"echo '{PENDING.format(reason=reason)}'")
    job.program("sinfo", "printf 'a1|drained|bad disk\\na2|down*|none\\n'")
    report = job.ask()
    assert report.state == "pending"
    assert "a1 is drained (bad disk), a2 is down*" in report.reason
    assert report.is_alive and read_job(job.attempt) == report
    job.program("scontrol", "echo JobId=7 JobState=RUNNING Reason=None NodeList=a1 TimeLimit=1:0")
    assert refresh(job.run_dir, job.attempt, max_age_s=60.0) == report
    assert job.ask().state == "running"
    job.program("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert job.ask().state == "running", "what it said last stands while it says nothing"


@pytest.mark.parametrize(
    ("state", "code", "says"),
    [
        ("TIMEOUT", 3, "time limit"),
        ("NODE_FAIL", 5, "one of its nodes failed"),
        ("OUT_OF_MEMORY", 4, "more memory"),
        ("CANCELLED", 130, "cancelled"),
    ],
)
def test_a_job_that_was_killed_with_its_script_has_an_outcome(
    job: Job, state: str, code: int, says: str
) -> None:
    job.program("scontrol", f"echo JobId=7 JobState={state} Reason=None ExitCode=0:9 NodeList=a1")
    assert job.ask().state == "ended"
    outcome = read_record(job.attempt.outcome) or {}
    assert outcome["exit_code"] == code and says in outcome["reason"]
    assert (outcome["error"] is None) == (code == 130)


def test_a_job_that_slurm_has_forgotten_is_over(job: Job) -> None:
    job.program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    job.program("sacct", "echo 'TIMEOUT|0:15|a1'")
    assert (job.ask().state, job.ask().word) == ("ended", "TIMEOUT")


@pytest.mark.parametrize("saves", [True, False])
def test_a_rendered_job_that_saves_nothing_is_not_queued_again(
    job: Job, tmp_path: Path, saves: bool
) -> None:
    before = job.run_dir.checkpoints / "step-00000004"
    make = f"mkdir -p {before.parent}/step-0000000{8 if saves else 4}"
    before.mkdir(parents=True)
    asked = job.bin / "asked"
    job.program("scancel", f"touch {asked}")
    job.program("scontrol", "exit 0")
    ask = f"kill -USR1 $PPID; until [ -e {asked} ]; do read -t 0.05; done"
    job.program("torchrun", f"{ask} <> <(:); {make}; exit 1")
    done = job.rendered(tmp_path)
    assert done.returncode == 1, done.stderr
    assert ("scontrol requeue 7" in job.calls.read_text()) == saves
    assert ("nothing was saved" in done.stderr) != saves

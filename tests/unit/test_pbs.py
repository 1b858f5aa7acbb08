"""The launcher pbs without a PBS: its script word for word, and what its commands' answers mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.config.sections.cluster import PbsLauncherConfig
from isles.errors import ConfigError, PreflightError
from isles.launch.queue.job import QueueJob
from isles.launch.queue.pbs import (
    Dialect,
    Pbs,
    ended_as,
    pending,
    read_attributes,
    write_dialect,
)
from isles.launch.queue.script import JobText, job_script, pbs_options, rendered_script
from isles.launch.queue.status import queue_job
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from tests.each import each
from tests.golden import check_golden

RUN = """\
name: llama-1b
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 32}
clusters:
  - launcher:
      kind: pbs
      queue: gpu
      account: physics
      time: 24h
      save_before: 10m
      memory_per_node: 200gb
      cpus_per_node: 32
      extra: [-m ae]
    nodes: 2
    gpus_per_node: 4
    workdir: /home/me/train
    environment: {venv: /home/me/venv, modules: [cuda/12.8], variables: {HF_HOME: /scratch/hf}}
    network: {profile: infiniband}
"""


def script(tmp_path: Path, dialect: Dialect, *overrides: str, alone: bool = False) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    config = load_run_file(path, overrides).config
    launcher = config.clusters[0].launcher
    assert isinstance(launcher, PbsLauncherConfig)
    per_node = config.clusters[0].gpus_per_node
    assert isinstance(per_node, int)
    device = "cpu" if config.clusters[0].device == "cpu" else "cuda"
    job = JobText(
        launcher=launcher.model_copy(update={"dialect": dialect}),
        nodes=config.clusters[0].max_nodes,
        nproc=per_node,
        device=device,
        workdir="/home/me/train",
        run_dir=None if alone else "/home/me/train/runs/llama-1b-1",
        attempt=0 if alone else 1,
    )
    if not alone:
        return job_script(config, job)
    command = ["-m", "isles.train", "run.yaml"]
    return rendered_script(config, job, command, path="/home/me/train/job.sh")


def test_the_openpbs_script(tmp_path: Path) -> None:
    check_golden("pbs-openpbs.sh", script(tmp_path, "openpbs"))


def test_the_torque_script(tmp_path: Path) -> None:
    check_golden("pbs-torque.sh", script(tmp_path, "torque"))


def test_the_script_of_one_node(tmp_path: Path) -> None:
    small = ("clusters.0.nodes=1", "clusters.0.launcher.time=null", "clusters.0.device=cpu")
    text = script(tmp_path, "openpbs", *small, "clusters.0.launcher.requeue=false")
    check_golden("pbs-one-node.sh", text)


def test_the_script_that_needs_no_run_directory(tmp_path: Path) -> None:
    check_golden("pbs-alone.sh", script(tmp_path, "openpbs", alone=True))


def requests(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#PBS -l")]


def test_a_request_of_the_users_own_replaces_ours(tmp_path: Path) -> None:
    own = "clusters.0.launcher.resources=select=2:ncpus=8:model=bro:mpiprocs=1"
    assert requests(script(tmp_path, "openpbs", own)) == [
        "#PBS -l select=2:ncpus=8:model=bro:mpiprocs=1",
        "#PBS -l walltime=24:00:00",
    ]


def test_torques_memory_is_that_of_the_whole_job(tmp_path: Path) -> None:
    assert "#PBS -l mem=400gb" in requests(script(tmp_path, "torque"))
    with pytest.raises(ConfigError, match="memory_per_node much is no size"):
        script(tmp_path, "torque", "clusters.0.launcher.memory_per_node=much")


def test_no_gpus_are_asked_for_on_cpus(tmp_path: Path) -> None:
    text = script(tmp_path, "openpbs", "clusters.0.device=cpu")
    assert "ngpus" not in text
    assert "NCCL" not in text


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("said", "dialect"),
    [
        ("echo 'pbs_version = 23.06.06'", "openpbs"),
        ("echo 'pbs_version = PBSPro_13.1.0.160576'", "openpbs"),
        ("echo 'Version: 6.1.2' >&2; echo 'Commit: 6611' >&2", "torque"),
    ],
)
def test_which_pbs_it_is_is_asked(tmp_path: Path, said: str, dialect: str) -> None:
    program(tmp_path / "bin", "qstat", said)
    assert Pbs(str(tmp_path / "bin")).dialect() == dialect


@pytest.mark.parametrize("said", ["echo 'Unknown option: version' >&2; exit 2", "echo GE 8.1.9"])
def test_the_qstat_of_another_queue_is_no_pbs(tmp_path: Path, said: str) -> None:
    program(tmp_path / "bin", "qstat", said)
    with pytest.raises(PreflightError, match="this is no PBS"):
        Pbs(str(tmp_path / "bin")).dialect()


def test_no_qstat_names_the_folder_that_was_looked_in(tmp_path: Path) -> None:
    with pytest.raises(PreflightError) as caught:
        Pbs(str(tmp_path)).dialect()
    assert f"{tmp_path}/qstat" in caught.value.where
    assert "bin_path" in caught.value.fix


ANSWER = """\
cat <<END
Job Id: 7.srv
    Job_Name = tiny
    job_state = {state}
    comment = {comment}
\t{rest}
    exec_host = a1/0*4+a2/0*4
    Resource_List.walltime = 01:00:00
    resources_used.walltime = 00:10:00
    {more}
END
"""


def job(tmp_path: Path, answer: str, dialect: Dialect = "openpbs") -> QueueJob:
    program(tmp_path / "bin", "qstat", answer)
    run_dir = RunDir(tmp_path / "run")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    write_dialect(attempt, dialect)
    return QueueJob(run_dir, attempt, "7.srv", Pbs(str(tmp_path / "bin")))


def test_a_waiting_job_says_why(tmp_path: Path) -> None:
    text = ANSWER.format(state="Q", comment="Can Never ", rest="Run: Insufficient amount", more="")
    report = job(tmp_path, text).look()
    assert report.state == "pending"
    assert "it can never run" in report.reason
    assert "Can Never Run: Insufficient amount" in report.reason
    assert "pbsnodes" in report.fix


def test_a_running_job_says_where_and_how_long(tmp_path: Path) -> None:
    report = job(tmp_path, ANSWER.format(state="R", comment="Job run", rest="", more="")).look()
    assert report.state == "running"
    assert report.reason.startswith("on a1+a2; its time limit is in 50m")


def test_a_job_over_its_time_names_the_key_to_change(tmp_path: Path) -> None:
    answer = ANSWER.format(state="F", comment="over", rest="", more="Exit_status = -29")
    pbs_job = job(tmp_path, answer)
    report = pbs_job.look()
    assert report.state == "ended"
    # It had been asked to save, and was too slow.
    pbs_job.attempt.stop_request.write_text('{"kind": "save", "requeue": true}')
    pbs_job.write_outcome(report)
    outcome = read_record(pbs_job.attempt.outcome) or {}
    assert outcome["state"] == "failed"
    assert "limit of time" in outcome["error"]["what"]
    assert "launcher.time" in outcome["error"]["fix"]


def test_torque_shows_ended_jobs_without_x(tmp_path: Path) -> None:
    answer = 'case "$*" in *-x*) exit 1;; esac\n' + ANSWER.format(
        state="C", comment="", rest="", more="exit_status = 271"
    )
    report = job(tmp_path, answer, "torque").look()
    assert (report.state, report.reason) == ("ended", "it was deleted (qdel)")


def test_the_job_that_goes_on_in_place_of_the_first_is_asked_for(tmp_path: Path) -> None:
    pbs_job = job(tmp_path, 'test "$3" = 9.srv && echo "    job_state = R"')
    (pbs_job.attempt.path / "job-id").write_text("9.srv\n")
    bin_path = str(tmp_path / "bin")
    launch = {"launcher": "pbs", "job_id": "7.srv", "bin_path": bin_path}
    write_record(pbs_job.attempt.launch, launch)
    found = queue_job(pbs_job.run_dir, pbs_job.attempt)
    assert found is not None and found.look().state == "running"


@each(
    ("letter", "comment", "words"),
    [
        (
            "Q",
            "Not Running: Insufficient amount of resource: ngpus",
            "nodes of this kind are taken",
        ),
        ("Q", "Not Running: Queue not started", "stopped by the administrator"),
        ("Q", "Not Running: User has reached queue gpu running job limit.", "limit of the user"),
        ("Q", "Not Running: Would conflict with reservation or top job", "reservation"),
        ("H", "", "it is held"),
        ("W", "", "start time"),
        ("Q", "", "has not said why"),
        ("Q", "Something new", "it waits: Something new"),
    ],
)
def test_reasons_in_words(letter: str, comment: str, words: str) -> None:
    assert words in pending(letter, comment, "7")[0]


@each(
    ("status", "words"),
    [
        ("0", "its script ended"),
        ("85", "exit status 85"),
        ("265", "killed by signal 9"),
        ("137", "killed by signal 9"),
        ("-27", "limit of memory"),
        ("", "deleted before it ran"),
    ],
)
def test_ends_in_words(status: str, words: str) -> None:
    assert words in ended_as(status, "")[0]


def test_a_long_attribute_goes_on_after_a_tab() -> None:
    text = "Job Id: 1\n    comment = one \n\ttwo\n    queue = q = r\n"
    assert read_attributes(text) == {"comment": "one two", "queue": "q = r"}


def test_values_that_pbs_would_misread(tmp_path: Path) -> None:
    config = load_run_file(_written(tmp_path), ()).config
    launcher = PbsLauncherConfig(queue="my queue", account="it's")

    def lines(run_dir: str) -> list[str]:
        return pbs_options(config, JobText(launcher, 1, 1, "cpu", "/", run_dir=run_dir, attempt=1))

    text = lines("/my runs/x-1")
    assert {"-q 'my queue'", "-o '/my runs/x-1/attempts/001/pbs.out'"} <= set(text)
    with pytest.raises(ConfigError, match="before the colon for a host"):
        lines("/runs:1/x-1")


def _written(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(RUN)
    return path

"""One run file, several clusters: this machine, hosts over ssh, jobs of a real Slurm and of the PBS
stand-in, started together."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from isles.run.join_line import JoinLine
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.deadline import DEADLINE_S
from tests.lab.home import HOSTS, ISLES, assert_nothing_left, isles, sh, until, write_run
from tests.lab.hosts import Lab
from tests.lab.pbs import pbs
from tests.lab.slurm import slurm
from tests.runs import outer_steps_of

EVERY = ("ctl", *HOSTS)
SHAPE = {
    "device": "cpu",
    "environment": {"variables": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
}
CHECKPOINT = {"every_steps": 20, "every_minutes": None, "keep": 1}


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Iterator[Lab]:
    with slurm(lab), pbs(lab, ("a1", "a3")):
        yield lab


def holds(path: Path, text: str) -> bool:
    """Whether a text is in a file; a checkpoint is renamed once it is whole."""
    with suppress(FileNotFoundError):
        return text.encode() in path.read_bytes()
    return False


def assert_secret_is_kept(lab: Lab, runs: dict[str, RunDir], job_id: str) -> None:
    """The token of the join line stands in the files that are for it, and in no other place."""
    token = JoinLine.read(lab.shared / "runs/far-1/hub/join").token
    for run_dir in runs.values():
        assert run_dir.join_line.stat().st_mode & 0o777 == 0o600
        assert token in run_dir.join_line.read_text()
    for host in EVERY:
        seen = sh(lab, host, "ps -eo args=; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
        assert "isles" in seen and token not in seen, host
    script = sh(lab, "ctl", f"scontrol write batch_script {job_id} -; scontrol show job {job_id}")
    assert "isles" in script and token not in script
    for root in (lab.shared, lab.root("a1") / "root/w", lab.root("a2") / "root/w"):
        files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
        holders = {path.name for path in files if holds(path, token)}
        assert holders <= {"join", "token"}, holders


def job_of(run_dir: RunDir) -> str:
    """The number of the job of a cluster's last start; empty: it is not submitted yet."""
    attempt = run_dir.last_attempt()
    assert attempt is not None
    return str((read_record(attempt.launch) or {}).get("job_id", ""))


def alone_after(run_dir: RunDir, number: int) -> list[int]:
    """The outer steps after one that a cluster has taken alone."""
    rows = outer_steps_of(run_dir)
    return [n for n, row in rows.items() if n > number and len(row["weights"]) == 1]


def digest_of(run_dir: RunDir) -> str:
    """Of the model that a finished run has exported."""
    return hashlib.sha256((run_dir.path / "model/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.long
def test_hosts_and_a_job_train_one_model_and_the_job_is_killed(lab: Lab) -> None:
    """The job is killed as by a crash of its node; the hosts go on without it, and the same command
    brings it back. The hosts are held meanwhile: it comes back before they are done.

    The clusters share no disk: the office's runs lie on a1's own, those of campus in /shared.
    """
    ssh = {"kind": "ssh", "hosts": ["a1", "a2"]}
    queue = {"kind": "slurm", "nodelist": "a3", "gres": "none", "time": "10m"}
    clusters = [
        {"name": "office", "launcher": ssh, "workdir": "/root/w"},
        {"name": "campus", "launcher": queue, "gpus_per_node": 2, "strategy": {"kind": "fsdp"}},
    ]
    write_run(
        lab,
        "far",
        output_dir="runs",
        training={"max_steps": 240, "global_batch_size": 8},
        checkpoint=CHECKPOINT,
        outer={"kind": "diloco", "sync_every": 20, "deadline": "200s"},
        clusters=[{**cluster, **SHAPE} for cluster in clusters],
    )
    for host in ("a1", "a2"):
        sh(lab, host, "mkdir /root/w; cp -r /shared/tiny /shared/words.jsonl /root/w")
    isles(lab, "train", "far.yaml", "--detach")
    office = RunDir(lab.root("a1") / "root/w/runs/far-office-1")
    campus = RunDir(lab.shared / "runs/far-campus-1")
    until(lambda: outer_steps_of(office) and outer_steps_of(campus), "an outer step of both")
    rank = (read_record(office.attempt(1).rank_record(0)) or {})["pid"]
    sh(lab, "a1", f"kill -STOP {rank}")
    first = job_of(campus)
    assert_secret_is_kept(lab, {"office": office, "campus": campus}, first)
    rows = isles(lab, "status", "far").splitlines()
    assert any("office" in row and "ssh" in row and "running" in row for row in rows), rows
    assert any("campus" in row and "slurm" in row and "running" in row for row in rows), rows

    before = max(outer_steps_of(office))
    sh(lab, "ctl", f"scancel --full --signal=KILL {first}")
    sh(lab, "a1", f"kill -CONT {rank}")
    alone = until(lambda: alone_after(office, before), "a step without the killed cluster")
    sh(lab, "a1", f"kill -STOP {rank}")

    def is_over() -> bool:
        """By what isles says, which does not ask the queue at every look."""
        rows = isles(lab, "status", "far").splitlines()
        return not any("campus" in row and "running" in row for row in rows)

    until(is_over, "its job's end")
    log = lab.shared / "again.log"
    command = f"cd /shared && exec {ISLES} train far.yaml >again.log 2>&1"
    again = lab.popen("ctl", ["bash", "-c", command])
    try:
        until(lambda: job_of(campus) not in ("", first), log.read_text)
        until(lambda: max(outer_steps_of(campus)) >= alone[0], log.read_text)
        sh(lab, "a1", f"kill -CONT {rank}")
        assert again.wait(timeout=DEADLINE_S) == 0, log.read_text()
    finally:
        again.kill()
    ours, theirs = outer_steps_of(office), outer_steps_of(campus)
    assert all(ours[n]["digest"] == theirs[n]["digest"] for n in ours.keys() & theirs.keys())
    assert max(theirs) == max(ours) > alone[-1]
    assert set(ours[max(ours)]["weights"]) == {"office", "campus"}
    assert digest_of(office) == digest_of(campus)
    assert "far-1 is finished" in log.read_text()
    assert_nothing_left(lab, EVERY)


@pytest.mark.long
def test_a_laptop_and_two_queues_behind_a_login_node_train_one_model(lab: Lab) -> None:
    """ctl is the laptop, which trains as well; a1 the login node of a Slurm and of a PBS."""
    login = {"login": "a1", "time": "10m"}
    slurm_job = {"kind": "slurm", "nodelist": "a2", "gres": "none", **login}
    clusters: list[dict[str, Any]] = [
        {"name": "laptop"},
        {"name": "campus", "launcher": slurm_job, "workdir": "/shared/campus"},
        {"name": "centre", "launcher": {"kind": "pbs", **login}, "workdir": "/shared/centre"},
    ]
    write_run(
        lab,
        "trio",
        output_dir="runs",
        model={"name_or_path": "llama-2m", "init": "scratch"},
        tokenizer=None,
        data={"sources": [{"type": "fake"}], "seq_length": 32},
        training={"max_steps": 60, "global_batch_size": 2},
        checkpoint=CHECKPOINT,
        outer={"kind": "diloco", "sync_every": 10, "deadline": "200s", "min_clusters": 3},
        clusters=[{**cluster, **SHAPE, "gpus_per_node": 1} for cluster in clusters],
    )
    sh(lab, "ctl", "mkdir -p /root/home /shared/campus /shared/centre")
    sh(lab, "ctl", "mv /shared/trio.yaml /root/home")

    def typed(*words: str) -> str:
        return sh(lab, "ctl", f"cd /root/home && {shlex.join((ISLES, *words))} 2>&1")

    text = typed("train", "trio.yaml", "--dry-run")
    assert all(cluster["name"] in text for cluster in clusters), text
    log = lab.root("ctl") / "root/home/train.log"
    command = f"cd /root/home && exec {ISLES} train trio.yaml >train.log 2>&1"
    laptop = lab.popen("ctl", ["bash", "-c", command])
    runs = {
        "laptop": RunDir(lab.root("ctl") / "root/home/runs/trio-laptop-1"),
        "campus": RunDir(lab.shared / "campus/runs/trio-campus-1"),
        "centre": RunDir(lab.shared / "centre/runs/trio-centre-1"),
    }
    try:
        queued = (runs["campus"], runs["centre"])
        until(lambda: all(run_dir.last_attempt() for run_dir in queued), log.read_text)
        rows = typed("status", "trio").splitlines()
        assert any("campus" in row and "slurm" in row for row in rows), rows
        assert any("centre" in row and "pbs" in row for row in rows), rows
        assert laptop.wait(timeout=DEADLINE_S) == 0, log.read_text()
    finally:
        laptop.kill()
    assert "trio-1 is finished" in log.read_text()
    for name, run_dir in runs.items():
        assert (read_record(run_dir.attempt(1).outcome) or {})["state"] == "finished"
        rows_of_all = outer_steps_of(run_dir)
        assert set(rows_of_all[max(rows_of_all)]["weights"]) == set(runs)
        text = typed("logs", "trio", "--cluster", name, "-n", "400")
        assert "outer joined standing=" in text and run_dir.path.name in text, text
    assert len({digest_of(run_dir) for run_dir in runs.values()}) == 1
    assert_nothing_left(lab, EVERY)

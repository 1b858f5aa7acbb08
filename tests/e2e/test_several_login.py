"""One run file on a laptop, three clusters: the laptop itself, a job of a real Slurm behind a login
node, and a job of the PBS stand-in behind the same."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from tests.deadline import DEADLINE_S
from tests.lab.home import ISLES, left, sh, until
from tests.lab.hosts import Lab, hosts
from tests.lab.pbs import pbs
from tests.lab.slurm import slurm

pytestmark = pytest.mark.lab

EVERY = ("ctl", "a1", "a2", "a3")
QUEUE = {"login": "a1", "time": "10m"}
CLUSTERS: list[dict[str, Any]] = [
    {"name": "laptop"},
    {
        "name": "campus",
        "launcher": {"kind": "slurm", "nodelist": "a2", "gres": "none", **QUEUE},
        "workdir": "/shared/campus",
    },
    {"name": "centre", "launcher": {"kind": "pbs", **QUEUE}, "workdir": "/shared/centre"},
]
SHAPE = {
    "device": "cpu",
    "gpus_per_node": 1,
    "environment": {"variables": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
}
RUN = {
    "name": "trio",
    "output_dir": "runs",
    "model": {"name_or_path": "llama-2m", "init": "scratch"},
    "data": {"sources": [{"type": "fake"}], "seq_length": 32},
    "training": {
        "max_steps": 60,
        "global_batch_size": 2,
        "precision": "32-true",
        "eval_steps": None,
    },
    "balance": "even",
    "checkpoint": {"every_steps": 20, "every_minutes": None, "keep": 1},
    "track": ["jsonl"],
    "outer": {"kind": "diloco", "sync_every": 10, "deadline": "200s", "min_clusters": 3},
    "clusters": [{**cluster, **SHAPE} for cluster in CLUSTERS],
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with hosts(tmp_path_factory.mktemp("login"), 3) as lab, slurm(lab), pbs(lab, ("a1", "a3")):
        sh(lab, "ctl", "mkdir -p /root/home /shared/campus /shared/centre")
        (lab.root("ctl") / "root/home/trio.yaml").write_text(yaml.safe_dump(RUN))
        yield lab


def typed(lab: Lab, *words: str) -> str:
    """An isles command on the laptop; it must succeed."""
    return sh(lab, "ctl", f"cd /root/home && {shlex.join((ISLES, *words))} 2>&1")


def model_of(run_dir: RunDir) -> Path:
    return run_dir.path / "model/model.safetensors"


@pytest.mark.long
def test_a_laptop_and_two_queues_behind_a_login_node_train_one_model(lab: Lab) -> None:
    text = typed(lab, "train", "trio.yaml", "--dry-run")
    assert all(cluster["name"] in text for cluster in CLUSTERS), text
    log = lab.root("ctl") / "root/home/train.log"
    command = f"cd /root/home && exec {ISLES} train trio.yaml >train.log 2>&1"
    laptop = lab.popen("ctl", ["bash", "-c", command])
    runs = {
        "laptop": RunDir(lab.root("ctl") / "root/home/runs/trio-laptop-1"),
        "campus": RunDir(lab.shared / "campus/runs/trio-campus-1"),
        "centre": RunDir(lab.shared / "centre/runs/trio-centre-1"),
    }
    try:
        until(
            lambda: runs["campus"].last_attempt() and runs["centre"].last_attempt(), log.read_text
        )
        rows = typed(lab, "status", "trio").splitlines()
        assert any("campus" in row and "slurm" in row for row in rows), rows
        assert any("centre" in row and "pbs" in row for row in rows), rows
        assert laptop.wait(timeout=DEADLINE_S) == 0, log.read_text()
    finally:
        laptop.kill()
    assert "trio-1 is finished" in log.read_text()
    for run_dir in runs.values():
        attempt = run_dir.last_attempt()
        assert attempt is not None
        assert (read_record(attempt.outcome) or {})["state"] == "finished"
        turns = [row for row in read_rows(run_dir.metrics) if row["kind"] == "outer"]
        assert set(turns[-1]["weights"]) == set(runs), turns[-1]
    digests = {hashlib.sha256(model_of(run).read_bytes()).hexdigest() for run in runs.values()}
    assert len(digests) == 1
    for name, run_dir in runs.items():
        text = typed(lab, "logs", "trio", "--cluster", name, "-n", "400")
        assert "outer joined standing=" in text and str(run_dir.path.name) in text, text
    until(lambda: not left(lab, EVERY), lambda: f"nothing left, and there is {left(lab, EVERY)}")

"""One run file, two clusters: hosts over ssh and a job of a real Slurm, started together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from isles.run.join_line import JoinLine
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from tests.lab.home import (
    DEADLINE_S,
    HOSTS,
    ISLES,
    isles,
    left,
    sh,
    until,
    write_inputs,
)
from tests.lab.hosts import Lab, hosts
from tests.lab.slurm import slurm

EVERY = ("ctl", *HOSTS)
CLUSTERS: list[dict[str, Any]] = [
    {
        "name": "office",
        "launcher": {"kind": "ssh", "hosts": ["a1", "a2"]},
        "workdir": "/root/w",
    },
    {
        "name": "campus",
        "launcher": {"kind": "slurm", "nodelist": "a3", "gres": "none", "time": "10m"},
        "gpus_per_node": 2,
        "strategy": {"kind": "fsdp"},
    },
]
SHAPE = {
    "device": "cpu",
    "environment": {"variables": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
}
RUN = {
    "name": "far",
    "output_dir": "runs",
    "model": {"name_or_path": "./tiny", "init": "scratch"},
    "tokenizer": {"train_vocab_size": 300},
    "data": {"sources": [{"path": "words.jsonl"}], "seq_length": 32, "packing": False},
    "training": {
        "max_steps": 240,
        "global_batch_size": 8,
        "learning_rate": 0.001,
        "precision": "32-true",
        "eval_steps": None,
    },
    "balance": "even",
    "checkpoint": {"every_steps": 20, "every_minutes": None, "keep": 1},
    "track": ["jsonl"],
    "outer": {"kind": "diloco", "sync_every": 20, "deadline": "200s"},
    "clusters": [{**cluster, **SHAPE} for cluster in CLUSTERS],
}
"""The clusters share no disk: the office's runs lie on a1's own, those of campus in /shared."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with hosts(tmp_path_factory.mktemp("several"), 3) as lab, slurm(lab):
        write_inputs(lab.shared)
        for host in ("a1", "a2"):
            sh(lab, host, "mkdir /root/w; cp -r /shared/tiny /shared/words.jsonl /root/w")
        (lab.shared / "far.yaml").write_text(yaml.safe_dump(RUN))
        yield lab


def turns(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """The turns that a cluster has applied, by number."""
    return {row["outer_step"]: row for row in read_rows(run_dir.metrics) if row["kind"] == "outer"}


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
        holders = {path.name for path in files if token.encode() in path.read_bytes()}
        assert holders <= {"join", "token"}, holders


def job_of(run_dir: RunDir) -> str:
    """The number of the job of a cluster's last start; empty: it is not submitted yet."""
    attempt = run_dir.last_attempt()
    assert attempt is not None
    return str((read_record(attempt.launch) or {}).get("job_id", ""))


def lonely(run_dir: RunDir, after: int) -> list[int]:
    """The turns after one that a cluster has taken alone."""
    return [t for t, row in turns(run_dir).items() if t > after and len(row["weights"]) == 1]


def digest_of(run_dir: RunDir) -> str:
    """Of the model that a finished run has exported."""
    return hashlib.sha256((run_dir.path / "model/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.long
def test_hosts_and_a_job_train_one_model_and_the_job_is_killed(lab: Lab) -> None:
    """The job is killed as by a crash of its node; the hosts' turns go on without it, and the same
    command brings it back. The hosts are held meanwhile: it comes back before they are done."""
    code, text, _ = isles(lab, "train", "far.yaml", "--detach")
    assert code == 0, text
    runs = {
        "office": RunDir(lab.root("a1") / "root/w/runs/far-office-1"),
        "campus": RunDir(lab.shared / "runs/far-campus-1"),
    }
    until(lambda: all(turns(run_dir) for run_dir in runs.values()), "a turn of both")
    attempt = runs["office"].last_attempt()
    assert attempt is not None
    rank = (read_record(attempt.rank_record(0)) or {})["pid"]
    sh(lab, "a1", f"kill -STOP {rank}")
    first = job_of(runs["campus"])
    assert_secret_is_kept(lab, runs, first)
    rows = isles(lab, "status", "far")[1].splitlines()
    assert any("office" in row and "ssh" in row and "running" in row for row in rows), rows
    assert any("campus" in row and "slurm" in row and "running" in row for row in rows), rows

    before = max(turns(runs["office"]))
    sh(lab, "ctl", f"scancel --full --signal=KILL {first}")
    sh(lab, "a1", f"kill -CONT {rank}")
    alone = until(lambda: lonely(runs["office"], before), "a turn without the killed cluster")
    sh(lab, "a1", f"kill -STOP {rank}")
    until(
        lambda: not sh(lab, "ctl", f"squeue -h -j {first} 2>/dev/null || true").strip(),
        "its job's end",
    )
    log = lab.shared / "again.log"
    command = f"cd /shared && exec {ISLES} train far.yaml >again.log 2>&1"
    again = lab.popen("ctl", ["bash", "-c", command])
    try:
        until(lambda: job_of(runs["campus"]) not in ("", first), log.read_text)
        until(lambda: max(turns(runs["campus"])) >= alone[0], log.read_text)
        sh(lab, "a1", f"kill -CONT {rank}")
        assert again.wait(timeout=DEADLINE_S) == 0, log.read_text()
    finally:
        again.kill()
    found = {name: turns(run_dir) for name, run_dir in runs.items()}
    common = found["office"].keys() & found["campus"].keys()
    assert all(found["office"][t]["digest"] == found["campus"][t]["digest"] for t in common)
    last = found["office"][max(found["office"])]
    assert max(found["campus"]) == max(found["office"]) > alone[-1]
    assert set(last["weights"]) == {"office", "campus"}
    assert digest_of(runs["office"]) == digest_of(runs["campus"])
    assert "far-1 is finished" in log.read_text()
    until(lambda: not left(lab, EVERY), lambda: f"nothing left, and there is {left(lab, EVERY)}")

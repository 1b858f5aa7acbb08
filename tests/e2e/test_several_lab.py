"""One run file, several clusters: this machine, hosts over ssh, jobs of a real Slurm and of the PBS
stand-in, started together."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator

import pytest

from isles.run.join_line import JoinLine
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.lab.home import (
    HOSTS,
    ISLES,
    QUOTED_ISLES,
    assert_nothing_left,
    isles,
    sh,
    started,
    until,
    write_run,
)
from tests.lab.hosts import Lab
from tests.lab.pbs import pbs
from tests.lab.slurm import slurm
from tests.runs import files_with, outer_steps_of

pytestmark = pytest.mark.long

EVERY = ("ctl", *HOSTS)
ENVIRON = {"variables": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}}
SHAPE = {"device": "cpu", "environment": ENVIRON}
CHECKPOINT = {"every_steps": 20, "every_minutes": None, "keep": 1}


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Iterator[Lab]:
    with slurm(lab), pbs(lab, ("a1", "a3")):
        yield lab


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
        assert {path.name for path in files_with(token, root)} <= {"join", "token"}


def job_of(run_dir: RunDir) -> str:
    """The number of the job of a cluster's last start; empty: it is not submitted yet."""
    return (read_record(run_dir.attempts()[-1].launch) or {}).get("job_id", "")


def has_row(shown: str, *words: str) -> bool:
    """Whether all words stand in one line of what is shown."""
    return any(all(word in line for word in words) for line in shown.splitlines())


def digest_of(run_dir: RunDir) -> str:
    """Of the model that a finished run has exported."""
    return hashlib.sha256((run_dir.path / "model/model.safetensors").read_bytes()).hexdigest()


def test_hosts_and_a_job_train_one_model_and_the_job_is_killed(lab: Lab) -> None:
    """The job is killed as by a crash of its node; the hosts go on without it, and the same command
    brings it back. The hosts are held meanwhile: it comes back before they are done. Both are held
    while they are looked at: neither goes on without the other.

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
    rank, theirs = (
        (read_record(r.attempt(1).rank_record(0)) or {})["pid"] for r in (office, campus)
    )
    sh(lab, "a1", f"kill -STOP {rank}")
    sh(lab, "a3", f"kill -STOP {theirs}")
    first = job_of(campus)
    assert_secret_is_kept(lab, {"office": office, "campus": campus}, first)
    assert has_row(isles(lab, "status", "far"), "office", "ssh", "running")
    assert has_row(isles(lab, "status", "far"), "campus", "slurm", "running")

    before = max(outer_steps_of(office))

    def alone_after() -> list[int]:
        rows = outer_steps_of(office)
        return [n for n, row in rows.items() if n > before and set(row["weights"]) == {"office"}]

    sh(lab, "ctl", f"scancel --full --signal=KILL {first}")
    sh(lab, "a1", f"kill -CONT {rank}")
    alone = until(alone_after, "a step without the killed cluster")
    sh(lab, "a1", f"kill -STOP {rank}")

    # By what isles says, which does not ask the queue at every look.
    until(lambda: not has_row(isles(lab, "status", "far"), "campus", "running"), "its job's end")
    again = started(lab, "ctl", ["bash", "-c", f"cd /shared && exec {QUOTED_ISLES} train far.yaml"])
    again.until(lambda: job_of(campus) not in ("", first))
    again.until(lambda: max(outer_steps_of(campus)) >= alone[0])
    sh(lab, "a1", f"kill -CONT {rank}")
    assert again.end() == 0, again.text
    ours, theirs = outer_steps_of(office), outer_steps_of(campus)
    assert all(ours[n]["digest"] == theirs[n]["digest"] for n in ours.keys() & theirs.keys())
    assert max(theirs) == max(ours) > alone[-1]
    assert set(ours[max(ours)]["weights"]) == {"office", "campus"}
    assert digest_of(office) == digest_of(campus)
    assert "far-1 is finished" in again.text
    assert_nothing_left(lab, EVERY)


def test_a_laptop_and_two_queues_behind_a_login_node_train_one_model(lab: Lab) -> None:
    """ctl is the laptop, which trains as well; a1 the login node of a Slurm and of a PBS."""
    login = {"login": "a1", "time": "10m"}
    slurm_job = {"kind": "slurm", "nodelist": "a2", "gres": "none", **login}
    clusters = [
        {"name": "laptop"},
        {"name": "campus", "launcher": slurm_job, "workdir": "/shared/campus"},
        {"name": "center", "launcher": {"kind": "pbs", **login}, "workdir": "/shared/center"},
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
    sh(lab, "ctl", "mkdir -p /root/home /shared/campus /shared/center")
    sh(lab, "ctl", "mv /shared/trio.yaml /root/home")

    def typed(*words: str) -> str:
        return sh(lab, "ctl", f"cd /root/home && {shlex.join((ISLES, *words))} 2>&1")

    text = typed("train", "trio.yaml", "--dry-run")
    assert all(cluster["name"] in text for cluster in clusters), text
    laptop = started(
        lab, "ctl", ["bash", "-c", f"cd /root/home && exec {QUOTED_ISLES} train trio.yaml"]
    )
    runs = {
        "laptop": RunDir(lab.root("ctl") / "root/home/runs/trio-laptop-1"),
        "campus": RunDir(lab.shared / "campus/runs/trio-campus-1"),
        "center": RunDir(lab.shared / "center/runs/trio-center-1"),
    }
    laptop.until(lambda: runs["campus"].last_attempt() and runs["center"].last_attempt())
    for words in (("campus", "slurm"), ("center", "pbs")):
        assert has_row(typed("status", "trio"), *words)
    assert laptop.end() == 0, laptop.text
    assert "trio-1 is finished" in laptop.text
    for name, run_dir in runs.items():
        assert (read_record(run_dir.attempt(1).outcome) or {})["state"] == "finished"
        rows_of_all = outer_steps_of(run_dir)
        assert set(rows_of_all[max(rows_of_all)]["weights"]) == set(runs)
        text = typed("logs", "trio", "--cluster", name, "-n", "400")
        assert "outer joined standing=" in text and run_dir.path.name in text, text
    assert len({digest_of(run_dir) for run_dir in runs.values()}) == 1
    assert_nothing_left(lab, EVERY)

"""`launcher: kubernetes` over pretend hosts, with a stand-in for the cluster and its kubectl
(tests/lab/kubernetes): real agents and ranks in pods that are processes; no part is Kubernetes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import Attempt, RunDir
from isles.run.restarts import current_restart, read_last_step
from tests.deadline import DEADLINE_S
from tests.lab.home import (
    ISLES,
    assert_nothing_left,
    has_done,
    isles,
    outcome_of,
    sh,
    until,
    write_run,
)
from tests.lab.hosts import Lab
from tests.lab.kube import IMAGE, kubernetes

NUM_HOSTS = 2
NODES = ("a1", "a2")
LONG = {"max_steps": 100_000}


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[Path]:
    with kubernetes(lab, NODES) as folder:
        yield folder


def prepare(lab: Lab, name: str, *, launcher: dict[str, Any] | None = None, **more: Any) -> None:
    """A run file /shared/NAME.yaml of two pods, whose run directory is on the claim `runs`."""
    given = {"kind": "kubernetes", "image": IMAGE, "context": "lab", "namespace": "team"}
    given |= {"volumes": [{"claim": "runs", "path": "/runs"}], "keep_job": "30s"}
    shape = {"nodes": 2, "gpus_per_node": 1, "device": "cpu", **more}
    environment = {"python": sys.executable}
    launch = {**given, **(launcher or {})}
    write_run(lab, name, output_dir="/runs", launcher=launch, environment=environment, **shape)


def run_dir_of(cluster: Path, name: str) -> RunDir:
    return RunDir(cluster / "claims" / "runs" / name)


def kubectl(lab: Lab, *words: str) -> str:
    return sh(lab, "ctl", f"kubectl {' '.join(words)}")


def pods_of(lab: Lab, name: str) -> dict[str, dict[str, Any]]:
    """The pods of a run that live, by their index."""
    items = json.loads(kubectl(lab, "get", "pods", "-l", "app.kubernetes.io/managed-by=isles",
                               "-o", "json"))["items"]  # fmt: skip
    key = "batch.kubernetes.io/job-completion-index"
    return {
        str(item["metadata"]["labels"].get(key)): item
        for item in items
        if item["status"]["phase"] == "Running" and f"isles-{name}-" in item["metadata"]["name"]
    }


def start(lab: Lab, name: str) -> subprocess.Popen[bytes]:
    """`isles train` on the laptop, which goes on following."""
    return lab.popen("ctl", ["bash", "-c", 'cd /shared && exec "$@"', "-", ISLES, "train",
                             f"{name}.yaml"])  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> str:
    out, _ = process.communicate(timeout=DEADLINE_S)
    return out.decode()


def assert_gone(lab: Lab) -> None:
    """No object of isles is in the cluster, and no process on its nodes."""

    def objects() -> list[str]:
        kinds = ["pods", "jobs.batch", "services", "configmaps", "secrets", "jobsets", "trainjobs",
                 "trainingruntimes"]  # fmt: skip
        found = [json.loads(kubectl(lab, "get", kind, "-o", "json")) for kind in kinds]
        return [item["metadata"]["name"] for each in found for item in each["items"]]

    until(lambda: not objects(), lambda: f"nothing left: {objects()}")
    assert_nothing_left(lab, NODES)


def test_a_killed_pod_comes_again_and_a_stop_leaves_nothing(lab: Lab, cluster: Path) -> None:
    prepare(lab, "pods", training=LONG)
    following = start(lab, "pods")
    run_dir = run_dir_of(cluster, "pods-1")
    attempt = run_dir.attempt(1)
    until(lambda: has_done(attempt, 2), "both train")
    pod = pods_of(lab, "pods")["1"]
    sh(lab, pod["host"], f"kill -KILL $(cat /run/pods/{pod['metadata']['name']})")
    until(lambda: has_done(attempt, 2, restart=1), "the ranks go on with another pod")
    again = pods_of(lab, "pods")["1"]
    assert again["metadata"]["name"] != pod["metadata"]["name"]
    text = isles(lab, "status", "pods")
    assert "running" in text and "pods-1@kubernetes:" in text, text
    isles(lab, "stop", "pods")
    said = end(following)
    assert following.returncode == ExitCode.REQUEUE, said
    assert outcome_of(attempt)["state"] == "stopped", said
    assert list_checkpoints(run_dir)[-1].step == outcome_of(attempt)["step"]
    token = attempt.token.read_text().strip()
    asked = (cluster / "asked").read_text()
    assert token not in asked and token not in said
    assert_gone(lab)


def evict(lab: Lab, attempt: Attempt, index: str) -> None:
    """Have one pod told to end; returns once the run has gone on after it."""
    step, number = read_last_step(attempt, None) or 0, current_restart(attempt)
    pod = pods_of(lab, "evicted")[index]["metadata"]["name"]
    kubectl(lab, "delete", "pods", pod, "--wait=false")
    until(lambda: current_restart(attempt) > number, "all have saved, and pods come again")
    until(lambda: has_done(attempt, step + 2, number + 1), "the run goes on from there")


@pytest.mark.long
def test_evicted_pods_save_and_go_on_and_a_closed_laptop_finds_the_run(
    lab: Lab, cluster: Path
) -> None:
    prepare(lab, "evicted", training=LONG)
    following = start(lab, "evicted")
    run_dir = run_dir_of(cluster, "evicted-1")
    attempt = run_dir.attempt(1)
    until(lambda: has_done(attempt, 2), "both train")
    sh(lab, "ctl", "pkill -KILL -f 'isles train [e]victed'")  # the laptop is gone
    following.communicate(timeout=DEADLINE_S)
    for index in ("1", "0"):
        evict(lab, attempt, index)
    saved = list_checkpoints(run_dir)[-1].step
    assert saved is not None and current_restart(attempt) == 2
    assert len(run_dir.attempts()) == 1, "one start, for all pods"
    assert "running" in isles(lab, "status", "evicted")
    assert isles(lab, "logs", "evicted", "--rank", "1").strip(), "read in a pod, by exec"
    isles(lab, "stop", "evicted")
    assert_gone(lab)
    # The Job is gone; the run directory is on the claim, and one may read it and go on.
    text = isles(lab, "status", "evicted")
    assert "stopped" in text, text
    assert_gone(lab)
    last = list_checkpoints(run_dir)[-1].step
    prepare(lab, "evicted", training={"max_steps": last + 3})
    text = isles(lab, "train", "evicted.yaml", "--resume", "/runs/evicted-1", expected=None)
    assert outcome_of(run_dir.attempt(2))["state"] == "finished", text
    assert_gone(lab)


@pytest.mark.long
def test_a_start_that_cannot_be_says_why_and_leaves_nothing(lab: Lab, cluster: Path) -> None:
    waits = {"pending_timeout": "10s"}
    for launcher, code, says in (
        ({"image": "isles:none"}, ExitCode.PREFLIGHT, "isles:none: not found"),
        ({"resources": {"example.com/gpu": "1"}, **waits}, ExitCode.PREFLIGHT, "nodes are avail"),
        ({"node_selector": {"kubernetes.io/hostname": "b9"}, **waits}, ExitCode.PREFLIGHT,
         "didn't match"),
    ):  # fmt: skip
        prepare(lab, "never", launcher=launcher)
        text = isles(lab, "train", "never.yaml", expected=code)
        assert says in text and "fix: " in text and "launcher." in text.split("fix: ")[-1], text
        assert_gone(lab)
    # Refused half-way: the owner is there, and what it needs is not.
    (cluster / "refused").write_text("Secret")
    for flavour in ("job", "trainjob"):
        prepare(lab, "never", launcher={"flavour": flavour, "keep_job": "1h"})
        text = isles(lab, "train", "never.yaml", expected=ExitCode.USER)
        assert "exceeded quota" in text and f"deleting {flavour}" in text, text
        assert_gone(lab)
    (cluster / "refused").unlink()
    # Interrupted, and an error that only the first pod can find.
    prepare(lab, "never", launcher={"image": "isles:test", "resources": {"a/gpu": "1"}})
    following = start(lab, "never")
    until(lambda: "never" in kubectl(lab, "get", "pods", "-o", "json"), "pods wait")
    sh(lab, "ctl", "pkill -HUP -f 'isles train [n]ever'")
    text = end(following)
    assert following.returncode != 0 and "deleting job" in text, text
    assert_gone(lab)
    prepare(lab, "never", data={"sources": [{"path": "nowhere.jsonl"}], "seq_length": 32})
    text = isles(lab, "train", "never.yaml", expected=ExitCode.USER)
    assert "nowhere.jsonl" in text, text
    assert_gone(lab)


@pytest.mark.long
def test_other_flavours_run_the_same_pods(lab: Lab, cluster: Path) -> None:
    for flavour in ("jobset", "trainjob"):
        keep = {"keep_job": "30s"} if flavour == "jobset" else {"keep_job": "1h"}
        launcher = {"flavour": flavour, **keep}
        prepare(lab, flavour, launcher=launcher, training={"max_steps": 3})
        text = isles(lab, "train", f"{flavour}.yaml")
        assert outcome_of(run_dir_of(cluster, f"{flavour}-1").attempt(1))["state"] == "finished"
        assert f"made {flavour} isles-{flavour}-" in text and "2 of 2 pods run" in text, text
        if flavour == "trainjob":  # Kubernetes keeps it
            isles(lab, "stop", flavour)
        assert_gone(lab)

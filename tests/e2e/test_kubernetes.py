"""`launcher: kubernetes` over pretend hosts, with a stand-in for the cluster and its kubectl
(tests/lab/kubernetes): real agents and ranks in pods that are processes; no part is Kubernetes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import Attempt, RunDir
from isles.run.restarts import current_restart, read_last_step
from tests.lab.home import (
    QUOTED_PYTHON,
    assert_nothing_left,
    assert_stopped,
    begin,
    end,
    install,
    isles,
    outcome_of,
    sh,
    signal_all,
    until,
    until_step,
    write_run,
)
from tests.lab.hosts import Lab

NUM_HOSTS = 2
NODES = ("a1", "a2")
LONG = {"max_steps": 100_000}
OWNERS = ("jobs", "jobsets", "trainjobs", "trainingruntimes")


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Iterator[Lab]:
    """`ctl` has kubectl; a1 and a2 are the nodes of its cluster."""
    folder, programs = lab.shared / ".kube", Path(__file__).parents[1] / "lab/kubernetes"
    folder.mkdir()
    install(lab, "ctl", "kubectl", f'exec {QUOTED_PYTHON} {quote(str(programs))}/kubectl.py "$@"')
    command = [sys.executable, programs / "cluster.py", folder, *NODES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, env=lab.environ(), **pipes)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"serving\n"
        yield lab
    finally:
        end(server)


def prepare(lab: Lab, name: str, *, launcher: dict[str, Any] | None = None, **more: Any) -> RunDir:
    """A run file /shared/NAME.yaml of two pods, whose run directory is on the claim `runs`."""
    given = {"kind": "kubernetes", "image": "isles:test", "context": "lab", "namespace": "team"}
    given |= {"volumes": [{"claim": "runs", "path": "/runs"}], "keep_job": "30s"}
    shape = {"nodes": 2, "gpus_per_node": 1, "device": "cpu", **more}
    environment = {"python": sys.executable}
    launch = {**given, **(launcher or {})}
    write_run(lab, name, output_dir="/runs", launcher=launch, environment=environment, **shape)
    return RunDir(lab.shared / ".kube/claims/runs" / f"{name}-1")


def items(lab: Lab, kind: str) -> list[dict[str, Any]]:
    """The objects of a kind."""
    return list(json.loads(sh(lab, "ctl", f"kubectl get {kind} -o json"))["items"])


def pod_of(lab: Lab, name: str, index: str) -> tuple[str, str]:
    """The pod of a run that lives, by its index: its name and its host."""
    live = {
        item["metadata"]["name"]: str(item["host"])
        for item in items(lab, "pods")
        if item["status"]["phase"] == "Running"
    }
    return next((pod, live[pod]) for pod in live if re.match(rf"isles-{name}-\w+-{index}-", pod))


def assert_gone(lab: Lab) -> None:
    """No object of isles is in the cluster, and no process on its nodes."""

    def objects() -> list[str]:
        kinds = (*OWNERS, "pods", "services", "configmaps", "secrets")
        return [item["metadata"]["name"] for kind in kinds for item in items(lab, kind)]

    until(lambda: not objects(), lambda: f"nothing left: {objects()}")
    assert_nothing_left(lab, NODES)


def test_pods_train_and_a_stop_leaves_nothing(lab: Lab) -> None:
    run_dir = prepare(lab, "pods", training=LONG)
    following = begin(lab, "train", "pods.yaml")
    attempt = run_dir.attempt(1)
    until_step(attempt, 2)
    text = isles(lab, "status", "pods")
    assert "running" in text and "pods-1@kubernetes:" in text, text
    isles(lab, "stop", "pods")
    said = end(following)
    assert following.returncode == ExitCode.REQUEUE, said
    assert_stopped(run_dir)
    asked = (lab.shared / ".kube/asked").read_text()
    assert attempt.token.read_text().strip() not in asked + said
    assert_gone(lab)


def evict(lab: Lab, attempt: Attempt, index: str) -> None:
    """Have one pod told to end; returns once the run has gone on after it."""
    step, number = read_last_step(attempt, None) or 0, current_restart(attempt)
    pod, _ = pod_of(lab, "evicted", index)
    sh(lab, "ctl", f"kubectl delete pods {pod} --wait=false")
    until(lambda: current_restart(attempt) > number, "all have saved, and pods come again")
    until_step(attempt, step + 2, number + 1)


@pytest.mark.long
def test_killed_and_evicted_pods_come_again_and_a_closed_laptop_finds_the_run(lab: Lab) -> None:
    run_dir = prepare(lab, "evicted", training=LONG)
    following = begin(lab, "train", "evicted.yaml")
    attempt = run_dir.attempt(1)
    until_step(attempt, 2)
    signal_all(lab, "ctl", signal.SIGKILL, "train", "evicted.yaml")  # the laptop is gone
    end(following)
    pod, host = pod_of(lab, "evicted", "1")
    sh(lab, host, f"kill -KILL $(cat /run/pods/{pod})")
    until_step(attempt, 2, restart=1)
    assert pod_of(lab, "evicted", "1")[0] != pod
    for index in ("1", "0"):
        evict(lab, attempt, index)
    assert list_checkpoints(run_dir) and current_restart(attempt) == 3
    assert len(run_dir.attempts()) == 1, "one start, for all pods"
    assert "running" in isles(lab, "status", "evicted")
    assert isles(lab, "logs", "evicted", "--rank", "1").strip(), "read in a pod, by exec"
    isles(lab, "stop", "evicted")
    assert_gone(lab)
    # The Job is gone; the run directory is on the claim, and one may read it and go on.
    text = isles(lab, "status", "evicted")
    assert "stopped" in text, text
    assert_gone(lab)
    prepare(lab, "evicted", training={"max_steps": assert_stopped(run_dir) + 3})
    text = isles(lab, "train", "evicted.yaml", "--resume", "/runs/evicted-1", expected=None)
    assert outcome_of(run_dir.attempt(2))["state"] == "finished", text
    assert_gone(lab)


@pytest.mark.long
def test_a_start_that_cannot_be_says_why_and_leaves_nothing(lab: Lab) -> None:
    waits = {"pending_timeout": "10s"}
    for launcher, says in (
        ({"image": "isles:none"}, "isles:none: not found"),
        ({"resources": {"example.com/gpu": "1"}, **waits}, "nodes are avail"),
        ({"node_selector": {"kubernetes.io/hostname": "b9"}, **waits}, "didn't match"),
    ):
        prepare(lab, "never", launcher=launcher)
        text = isles(lab, "train", "never.yaml", expected=ExitCode.PREFLIGHT)
        assert says in text and "fix: " in text and "launcher." in text.split("fix: ")[-1], text
        assert_gone(lab)
    # Refused half-way: the owner is there, and what it needs is not.
    refused = lab.shared / ".kube/refused"
    refused.write_text("Secret")
    for flavor in ("job", "trainjob"):
        prepare(lab, "never", launcher={"flavor": flavor, "keep_job": "1h"})
        text = isles(lab, "train", "never.yaml", expected=ExitCode.USER)
        assert "exceeded quota" in text and f"deleting {flavor}" in text, text
        assert_gone(lab)
    refused.unlink()
    # Interrupted, and an error that only the first pod can find.
    prepare(lab, "never", launcher={"image": "isles:test", "resources": {"a/gpu": "1"}})
    following = begin(lab, "train", "never.yaml")
    until(lambda: "never" in str(items(lab, "pods")), "pods wait")
    signal_all(lab, "ctl", signal.SIGHUP, "train", "never.yaml")
    text = end(following)
    assert following.returncode != 0 and "deleting job" in text, text
    assert_gone(lab)
    prepare(lab, "never", data={"sources": [{"path": "nowhere.jsonl"}], "seq_length": 32})
    text = isles(lab, "train", "never.yaml", expected=ExitCode.USER)
    assert "nowhere.jsonl" in text, text
    assert_gone(lab)


@pytest.mark.long
def test_other_flavors_run_the_same_pods(lab: Lab) -> None:
    for flavor, keep in (("jobset", "30s"), ("trainjob", "1h")):
        launcher = {"flavor": flavor, "keep_job": keep}
        run_dir = prepare(lab, flavor, launcher=launcher, training={"max_steps": 3})
        text = isles(lab, "train", f"{flavor}.yaml")
        assert outcome_of(run_dir.attempt(1))["state"] == "finished"
        assert f"made {flavor} isles-{flavor}-" in text and "2 of 2 pods run" in text, text
        if flavor == "trainjob":  # Kubernetes keeps it
            isles(lab, "stop", flavor)
        assert_gone(lab)

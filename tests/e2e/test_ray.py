"""`launcher: ray` on a real Ray: trained, stopped, resumed; actors, nodes and resources that go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.restarts import list_restarts
from tests.lab.home import (
    assert_nothing_left,
    assert_stopped,
    begin,
    end,
    isles,
    left,
    outcome_of,
    processes,
    sh,
    until,
    until_step,
    write_run,
)
from tests.lab.hosts import MARK, Lab
from tests.lab.ray import ADDRESS, RayLab, ray_cluster

BIG = {"gpus": 2, "resources": {"big": 1}, "label_selector": {"card": "new"}}
LONG = {"max_steps": 100_000}
SAVES = {"every_steps": None, "every_minutes": None, "export_on_finish": False}


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[RayLab]:
    """Two unequal nodes: a1, the head, and a2, which is larger; tests add a3."""
    a2 = ["--num-cpus=2", '--resources={"big":1}', "--labels=card=new"]
    resources = {"a1": ["--num-cpus=2"], "a2": a2, "a3": ["--num-cpus=1"]}
    with ray_cluster(lab, resources, "a1", "a2") as made:
        yield made


def write(lab: Lab, name: str, **more: Any) -> RunDir:
    launcher = {"kind": "ray", "address": ADDRESS, **more.pop("launcher", {})}
    # What Ray starts has the environment of Ray, but for what the run file adds.
    environment = {"variables": {MARK: name}, **more.pop("environment", {})}
    shape = {"device": "cpu", "gpus_per_node": 1, "nodes": 2, "launcher": launcher, **more}
    shape["environment"] = environment
    write_run(lab, name, **shape)
    return RunDir(lab.shared / "runs" / f"{name}-1")


def hosts_of(attempt: Attempt) -> dict[int, str]:
    """The host of each node that is there."""
    nodes = (read_record(attempt.nodes) or {}).get("nodes", [])
    return {node["node"]: node["host"] for node in nodes if node["state"] == "there"}


def test_unequal_nodes_train_save_and_stop_with_the_terminal_closed(lab, cluster):
    eats = {"setup": ["echo modules are loaded; cat"]}  # what comes by standard input
    launcher = {"bundles": [BIG, {}]}
    run_dir = write(lab, "stop", launcher=launcher, environment=eats, training=LONG)
    text = isles(lab, "train", "stop.yaml", "--dry-run", host="a1")
    assert "node 0: CPU 2, big 1" in text and not run_dir.path.exists(), text
    following = begin(lab, "train", "stop.yaml", host="a1")
    attempt = run_dir.attempt(1)
    until_step(attempt, 3)
    os.killpg(following.pid, signal.SIGHUP)
    end(following)
    until_step(attempt, 6)
    assert left(lab, ["a1"]) and left(lab, ["a2"]), "its processes are known as a test's"
    assert hosts_of(attempt) == {0: "a2", 1: "a1"}, "the first bundle is that of the large node"
    text = isles(lab, "status", "stop-1", host="a1")
    assert "running" in text and "a2" in text, text
    launch = read_record(attempt.launch) or {}
    shown = sh(lab, "a1", f"curl -s {ADDRESS}/api/jobs/")
    assert launch["job_id"] in shown
    assert attempt.token.read_text().strip() not in shown + str(launch)
    isles(lab, "stop", "stop-1", host="a1")
    step = assert_stopped(run_dir)
    more = ("--resume", "runs/stop-1", f"training.max_steps={step + 1}")
    text = isles(lab, "train", "stop.yaml", *more, host="a1")
    assert f"after step {step}: " in text and "stop-1 is finished" in text, text
    assert all("modules are loaded" in attempt.node_log(node).read_text() for node in (0, 1))
    assert_nothing_left(lab)


@pytest.mark.long
def test_an_actor_that_is_killed_is_placed_anew_and_the_run_goes_on(lab, cluster):
    run_dir = write(lab, "actor", training=LONG, checkpoint={**SAVES, "every_steps": 5})
    isles(lab, "train", "actor.yaml", "--detach", host="a1")
    attempt = run_dir.attempt(1)
    until_step(attempt, 8)
    (agent,) = processes(lab, "a2", "isles.agent", "-")
    next(above for above in agent.parents() if above.cmdline()[0].startswith("ray::Place")).kill()
    until(lambda: not agent.is_running(), "its agent ends with it")
    until_step(attempt, 12, restart=1)
    (restart,) = list_restarts(attempt)
    assert "a2" in restart.why and restart.saved and restart.is_counted, restart
    assert set(hosts_of(attempt).values()) == {"a1", "a2"}
    isles(lab, "stop", "actor-1", "--now", host="a1")
    assert outcome_of(attempt)["exit_code"] == ExitCode.INTERRUPTED
    assert_nothing_left(lab)


@pytest.mark.long
def test_a_node_that_dies_is_done_without_and_taken_in_again(lab: Lab, cluster: RayLab) -> None:
    cluster.start("a3")
    run_dir = write(lab, "node", nodes="2:3", training=LONG, checkpoint={**SAVES, "every_steps": 5})
    isles(lab, "train", "node.yaml", "--detach", host="a1")
    attempt = run_dir.attempt(1)
    until_step(attempt, 8)
    assert len(hosts_of(attempt)) == 3
    cluster.end("a3")
    until_step(attempt, 12, restart=1)
    assert set(hosts_of(attempt).values()) == {"a1", "a2"}
    cluster.start("a3")
    until_step(attempt, 16, restart=2)
    assert set(hosts_of(attempt).values()) == {"a1", "a2", "a3"}
    isles(lab, "stop", "node-1", host="a1")
    assert_stopped(run_dir)
    cluster.end("a3")
    assert_nothing_left(lab)


@pytest.mark.long
def test_nodes_that_never_come_are_named_and_a_wait_can_be_stopped(lab, cluster):
    wanted = {"launcher": {"bundles": [BIG, {"resources": {"tape": 1}}]}}
    run_dir = write(lab, "never", start_timeout="12s", **wanted)
    text = isles(lab, "train", "never.yaml", host="a1", expected=ExitCode.COMMUNICATION)
    for word in ("node 1 needs CPU 1, tape 1", "a2 has CPU 2, big 1", "within 12s", "fix: "):
        assert word in text, text
    assert "waiting for nodes: Ray has no node for 1 of 2" in text, "the wait says for whom"
    text = isles(lab, "check", "never.yaml", "--no-net", host="a1", expected=ExitCode.PREFLIGHT)
    assert "queue.nodes" in text and "node 1 needs CPU 1, tape 1" in text, text
    text = isles(lab, "plan", "never.yaml", host="a1")
    assert "10.77.1.2" in text and "Ray has no node for 1 of 2" in text, text
    run_dir = write(lab, "wait", start_timeout="10m", **wanted)
    isles(lab, "train", "wait.yaml", "--detach", host="a1")
    until(lambda: "tape" in str(read_record(run_dir.status)), "the wait is shown")
    assert "tape 1" in isles(lab, "status", "wait-1", host="a1")
    isles(lab, "stop", "wait-1", host="a1")
    assert outcome_of(run_dir.attempt(1))["exit_code"] == ExitCode.REQUEUE
    assert_nothing_left(lab)


@pytest.mark.long
def test_nodes_without_a_shared_disk_get_their_files_and_the_head_keeps_the_run(lab, cluster):
    write(lab, "apart", output_dir="/root/runs", launcher={"address": "auto", "login": "a1"})
    text = isles(lab, "train", "apart.yaml")
    assert "apart-1 is finished" in text, text
    run_dir = RunDir(lab.root("a1") / "root/runs/apart-1")
    assert list_checkpoints(run_dir)
    nodes = (read_record(run_dir.attempt(1).nodes) or {})["nodes"]
    assert [node["name"] for node in nodes] == ["a1", "a2"], "the run is kept by the first"
    # A machine that is no node keeps it where the head does not see it.
    here = ("clusters.0.launcher.login=null", f"clusters.0.launcher.address={ADDRESS}")
    text = isles(lab, "train", "apart.yaml", *here, expected=2)
    assert "a1, where Ray runs the job, does not see the run directory /root/runs/apart-1" in text
    assert_nothing_left(lab)

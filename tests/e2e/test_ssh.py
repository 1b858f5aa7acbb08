"""`launcher: ssh` on hosts with a real sshd: one command, the same weights as on one machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isles.errors import ExitCode
from isles.rundir.paths import RunDir
from isles.rundir.records import read_record, read_rows
from isles.rundir.remote import list_remotes
from tests.dist.test_same_mathematics import weights_of
from tests.lab.home import HOSTS, assert_nothing_left, isles, left, sh, until, write_run
from tests.lab.hosts import Lab, hosts


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with hosts(tmp_path_factory.mktemp("ssh"), 3) as lab:
        # a2 prints a banner and its .bashrc talks; a3 is behind a1, under a name of ~/.ssh/config.
        sh(lab, "a2", "echo 'Welcome to a2' > /etc/lab/banner; echo 'echo hello' > /root/.bashrc")
        sh(lab, "a2", "echo 'Banner /etc/lab/banner' >> /etc/lab/sshd_config; kill -HUP 1")
        jump = "Host attic\n  HostName a3\n  ProxyJump a1\n"
        sh(lab, "ctl", f"printf '{jump}' | cat - ~/.ssh/config > x && cat x > ~/.ssh/config")
        yield lab


def test_three_hosts_train_as_one_machine(lab: Lab) -> None:
    """Ranks in the order of the list, unequal hosts, a run directory on the first one's own disk;
    nobody watches: the command has left."""
    three = ["a2", "attic", {"ssh": "a1", "gpus": 2}]
    path = write_run(lab, "three", hosts=three, output_dir="/root/runs")
    code, text, _ = isles(lab, "train", "three.yaml", "--detach")
    assert code == 0, text
    assert "4 CPU processes on 3 hosts (a2: 10.77.1.2, 1 rank, attic: 10.77.1.3, 1 rank" in text
    run_dir = RunDir(lab.root("a2") / "root" / "runs" / "three-1")
    attempt = run_dir.attempt(1)
    outcome = until(lambda: read_record(attempt.outcome), "the run ends")
    assert outcome["state"] == "finished", outcome
    losses = [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.2
    launch = read_record(attempt.launch) or {}
    assert launch["launcher"] == "ssh" and launch["hosts"] == ["a2", "attic", "a1"]
    assert [node["host"] for node in launch["nodes"]] == ["a2", "a3", "a1"]
    (remote,) = list_remotes(lab.root("ctl") / "root" / "runs")
    assert (remote.ssh, remote.path) == ("a2", "/root/runs/three-1")
    assert_nothing_left(lab)

    text = path.read_text().replace("three", "alone", 1)
    (lab.shared / "alone.yaml").write_text(text)
    local = "clusters=[{gpus_per_node: 4}]"
    code, text, _ = isles(lab, "train", "alone.yaml", local, "output_dir=/shared/runs", host="a1")
    assert code == 0, text
    ours, theirs = weights_of(run_dir), weights_of(RunDir(lab.shared / "runs" / "alone-1"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_dry_run_names_the_commands_and_starts_nothing(lab: Lab) -> None:
    write_run(lab, "dry", environment={"variables": {"WORD": "a b"}}, network={"port": 29555})
    code, text, _ = isles(lab, "train", "dry.yaml", "--dry-run")
    assert code == 0, text
    assert "this would be a new run: dry-1" in text
    assert "export WORD='a b'" in text and "cd /shared || exit 1" in text
    cores = len(os.sched_getaffinity(0))
    for node, host in enumerate(HOSTS):
        assert f"then on {host}: {lab.address(host)}, 1 rank" in text
        tail = f"-m isles.train.agent /shared/runs/dry-1 --attempt 1 --node {node}"
        variables = f"GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS={cores}"
        assert f"env {variables} {sys.executable} {tail}" in text
    assert not (lab.shared / "runs" / "dry-1").exists()
    assert not left(lab)


def test_a_taken_port_is_not_used(lab: Lab) -> None:
    listen = "import os, socket, time; s = socket.create_server(('', 29500)); "
    listen += "print(os.getpid(), flush=True); time.sleep(600)"
    listener = lab.popen("a1", [sys.executable, "-c", listen])
    assert listener.stdout is not None
    pid = int(listener.stdout.readline())
    try:
        write_run(lab, "port")
        _, text, _ = isles(lab, "train", "port.yaml", "--dry-run")
        assert "meeting at 10.77.1.1 port 29501" in text
    finally:
        sh(lab, "a1", f"kill {pid}")
        listener.wait(timeout=30)


def test_files_travel_and_environments_are_compared(lab: Lab) -> None:
    """The hosts have no such folder, and no files: sync brings both."""
    sh(lab, "ctl", "mkdir -p /root/here/runs; cp -r /shared/tiny /shared/words.jsonl /root/here")
    write_run(lab, "sync", workdir="/root/there", sync={"paths": ["."]}, output_dir="runs")
    sh(lab, "ctl", "cp /shared/sync.yaml /root/here; touch /root/here/runs/mine")
    begin = f"cd /root/here && {sys.executable} -m isles"
    text = sh(lab, "ctl", f"{begin} train sync.yaml training.max_steps=0 2>&1 || true")
    assert "training.max_steps" in text and not left(lab), "nothing is copied for a wrong run file"
    text = sh(lab, "ctl", f"{begin} setup sync.yaml clusters.0.workdir=/shared --check")
    assert "3 hosts are equal: python" in text
    command = f"{begin} train sync.yaml data.sources.0.path=no.jsonl 2>&1 || true"
    text = sh(lab, "ctl", command)
    assert "host a2: rsync cannot be used" in text and "let ~/.bashrc print only" in text
    sh(lab, "a2", "rm /root/.bashrc")
    text = sh(lab, "ctl", command)
    assert "copied to a2:/root/there: " in text
    assert "data.sources.0.path (on host a1): there is no such file: /root/there/no.jsonl" in text
    assert "did you mean words.jsonl?" in text
    assert sh(lab, "a3", "ls -A /root/there").split() == ["sync.yaml", "tiny", "words.jsonl"]


def test_setup_installs_once_and_then_finds_it_ready(lab: Lab) -> None:
    """The packages that isles needs are there, by a .pth, as no host has a network to fetch them;
    isles itself is not."""
    write_run(lab, "fresh", hosts=["a3"], environment={"venv": "/root/fresh"})
    sh(lab, "a3", f"{sys.executable} -m venv --without-pip /root/fresh")
    site = sh(
        lab, "a3", "/root/fresh/bin/python -c 'import site; print(site.getsitepackages()[0])'"
    )
    sh(lab, "a3", f"echo {Path(torch.__file__).parents[1]} > {site.strip()}/these.pth")
    code, text, _ = isles(lab, "setup", "fresh.yaml", "--check")
    assert code == ExitCode.PREFLIGHT and "host a3: isles is not installed for /root/fresh" in text
    code, text, _ = isles(lab, "setup", "fresh.yaml")
    assert code == 0, text
    assert "a3: installing isles and what it needs into /root/fresh" in text
    assert "a3: installed" in text and "ready: python 3." in text
    look = "cd / && /root/fresh/bin/python -c 'import isles; print(isles.__file__)'"
    assert sh(lab, "a3", look).startswith("/root/fresh/")
    code, text, _ = isles(lab, "setup", "fresh.yaml")
    assert code == 0 and "installing" not in text and "a3: was ready" in text, text

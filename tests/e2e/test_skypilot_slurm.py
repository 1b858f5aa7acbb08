"""`launcher: skypilot` with the real SkyPilot, whose backend for Slurm gets its nodes from the
lab's real Slurm. Only what SkyPilot fetches from the internet is put there: uv and its packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.errors import ExitCode
from isles.run.paths import RunDir
from tests.lab.home import (
    assert_nothing_left,
    assert_stopped,
    install,
    isles,
    sh,
    until,
    until_step,
    write_run,
)
from tests.lab.hosts import Lab
from tests.lab.slurm import slurm
from tests.programs import write_program
from tests.skypilot_python import skypilot_python

NUM_HOSTS = 2
NODES = ("a1", "a2")
# SkyPilot makes an environment on the nodes by uv; here that is the one that the test has made.
UV = """\
#!/bin/sh
case "$1" in
venv)
  for word; do case $word in venv | -* | 3.*) ;; *) target=$word ;; esac; done
  mkdir -p "$(dirname "$target")" && ln -sfn {folder} "$target" ;;
run)
  while [ "$1" = run ] || [ "${{1#--}}" != "$1" ]; do shift; done
  PATH={folder}/bin:$PATH exec "$@" ;;
esac
"""
CURL = """echo 'mkdir -p "$UV_INSTALL_DIR" && cp /shared/uv "$UV_INSTALL_DIR/uv"'"""
CONFIG = "slurm: {cluster_configs: {lab: {workdir: /shared/sky}}}"
LOGIN = "Host lab\n  HostName ctl\n  User root\n  IdentityFile ~/.ssh/id_lab"


@pytest.fixture(autouse=True, scope="module")
def folder() -> Path:
    """SkyPilot's environment, which is there before the hosts are."""
    return skypilot_python().parent.parent


@pytest.fixture(autouse=True)
def sky(folder: Path, lab: Lab) -> Iterator[None]:
    """Slurm, and the command sky on the laptop, which knows it as a cluster of SkyPilot."""
    write_program(lab.shared / "uv", UV.format(folder=folder))
    (lab.shared / "sky").mkdir()
    program = f'exec {folder}/bin/python {folder}/bin/sky "$@"'
    with slurm(lab):
        for host in ("ctl", *NODES):
            install(lab, host, "curl", CURL)
        sh(lab, "ctl", "rm -rf ~/.sky; mkdir ~/.sky ~/.slurm")
        sh(lab, "ctl", f"echo '{CONFIG}' >~/.sky/config.yaml; echo '{LOGIN}' >~/.slurm/config")
        install(lab, "ctl", "sky", f"export SKYPILOT_DISABLE_USAGE_COLLECTION=1\n{program}")
        yield
        sh(lab, "ctl", "sky api stop")


@pytest.mark.long
def test_two_nodes_of_slurm_train_by_the_real_skypilot(lab: Lab) -> None:
    mounts = {"~/sky_workdir/tiny": "tiny", "~/sky_workdir/words.jsonl": "words.jsonl"}
    resources = {"infra": "slurm", "cpus": "1+", "memory": "0.1+"}
    launcher = {"kind": "skypilot", "file_mounts": mounts, "resources": resources}
    cluster = {"device": "cpu", "gpus_per_node": 1, "nodes": 2, "workdir": None}
    cluster |= {"environment": {"python": sys.executable}}
    # A name that is none of isles: SkyPilot's own processes have it, and stay until sky down.
    mine = {**launcher, "cluster": "mine"}
    long = {"max_steps": 100_000}
    write_run(lab, "real", output_dir="runs", launcher=mine, training=long, **cluster)
    isles(lab, "train", "real.yaml", "--detach")
    # All nodes of a cluster have one home, on the disk that they share.
    (path,) = lab.shared.glob("sky/.sky_clusters/*/sky_workdir/runs/real-1")
    attempt = RunDir(path).attempt(1)
    until_step(attempt, 3)
    assert "running" in isles(lab, "status", "real-1@mine")
    assert "rank 1]" in isles(lab, "logs", "real-1@mine")
    assert "mine" in sh(lab, "ctl", "squeue"), "it is a job of Slurm"
    isles(lab, "stop", "real-1@mine")
    assert_stopped(RunDir(path))
    assert_nothing_left(lab, NODES)
    # A start that fails: the data is not on the nodes, and the machines are given back.
    other, gone = {**launcher, "cluster": "other"}, {"path": "gone.jsonl"}
    data = {"sources": [gone], "seq_length": 32}
    write_run(lab, "never", output_dir="runs", launcher=other, data=data, **cluster)
    sh(lab, "ctl", "sky down --yes mine")
    until(lambda: not path.exists(), "the home of the job goes with it")
    text = isles(lab, "train", "never.yaml", expected=ExitCode.PREFLIGHT)
    assert "gone.jsonl" in text and "sky down --yes other" in text, text
    until(lambda: not sh(lab, "ctl", "squeue --noheader"), "no job of Slurm is left")
    assert_nothing_left(lab, NODES)

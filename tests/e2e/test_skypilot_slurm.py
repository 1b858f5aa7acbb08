"""`launcher: skypilot` with the real SkyPilot, whose backend for Slurm gets its nodes from the
lab's real Slurm. Only what SkyPilot fetches from the internet is put there: uv and its packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from tests.lab.home import assert_nothing_left, has_done, isles, outcome_of, sh, until, write_run
from tests.lab.hosts import Lab
from tests.lab.slurm import slurm
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
CURL = """\
#!/bin/sh
echo 'mkdir -p "$UV_INSTALL_DIR" && cp /shared/uv "$UV_INSTALL_DIR/uv"'
"""
CONFIG = "slurm: {cluster_configs: {lab: {workdir: /shared/sky}}}\n"
LOGIN = "Host lab\n  HostName ctl\n  User root\n  IdentityFile ~/.ssh/id_lab\n"


@pytest.fixture(autouse=True, scope="module")
def folder() -> Path:
    """SkyPilot's environment, which is there before the hosts are."""
    return skypilot_python().parent.parent


@pytest.fixture(autouse=True)
def sky(folder: Path, lab: Lab) -> Iterator[None]:
    """Slurm, and the command sky on the laptop, which knows it as a cluster of SkyPilot."""
    for name, text in (("uv", UV.format(folder=folder)), ("curl", CURL)):
        (lab.shared / name).write_text(text)
        (lab.shared / name).chmod(0o755)
    (lab.shared / "sky").mkdir()
    (lab.shared / "config").write_text(CONFIG)
    (lab.shared / "login").write_text(LOGIN)
    program = f"#!/bin/sh\\nexport SKYPILOT_DISABLE_USAGE_COLLECTION=1\\nexec {folder}/bin/python"
    program += f' {folder}/bin/sky "$@"\\n'
    with slurm(lab):
        for host in ("ctl", *NODES):
            sh(lab, host, "install -m 755 /shared/curl /usr/local/bin/curl")
        sh(lab, "ctl", "rm -rf ~/.sky && mkdir ~/.sky ~/.slurm && cp /shared/config ~/.sky/"
           "config.yaml && cp /shared/login ~/.slurm/config")  # fmt: skip
        sh(lab, "ctl", f"printf '{program}' >/usr/local/bin/sky && chmod 755 /usr/local/bin/sky")
        yield
        sh(lab, "ctl", "sky api stop")


@pytest.mark.long
def test_two_nodes_of_slurm_train_by_the_real_skypilot(lab: Lab) -> None:
    mounts = {"~/sky_workdir/tiny": "tiny", "~/sky_workdir/words.jsonl": "words.jsonl"}
    resources = {"infra": "slurm", "cpus": "1+", "memory": "0.1+"}
    launcher = {"kind": "skypilot", "file_mounts": mounts, "resources": resources}
    cluster = {"device": "cpu", "gpus_per_node": 1, "nodes": 2, "workdir": None}
    # A name that is none of isles: SkyPilot's own processes have it, and stay until sky down.
    mine = {**launcher, "cluster": "mine"}
    write_run(lab, "real", output_dir="runs", launcher=mine, training={"max_steps": 100_000},
              environment={"python": sys.executable}, **cluster)  # fmt: skip
    isles(lab, "train", "real.yaml", "--detach")
    # All nodes of a cluster have one home, on the disk that they share.
    (path,) = lab.shared.glob("sky/.sky_clusters/*/sky_workdir/runs/real-1")
    attempt = RunDir(path).attempt(1)
    until(lambda: has_done(attempt, 3), "both train")
    assert "running" in isles(lab, "status", "real-1@mine")
    assert "rank 1]" in isles(lab, "logs", "real-1@mine")
    assert "mine" in sh(lab, "ctl", "squeue"), "it is a job of Slurm"
    isles(lab, "stop", "real-1@mine")
    outcome = outcome_of(attempt)
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", ExitCode.REQUEUE)
    assert list_checkpoints(RunDir(path))[-1].step == outcome["step"]
    assert_nothing_left(lab, NODES)
    # A start that fails: the data is not on the nodes, and the machines are given back.
    write_run(lab, "never", output_dir="runs", launcher={**launcher, "cluster": "other"},
              environment={"python": sys.executable}, **cluster,
              data={"sources": [{"path": "gone.jsonl"}], "seq_length": 32})  # fmt: skip
    sh(lab, "ctl", "sky down --yes mine")
    until(lambda: not path.exists(), "the home of the job goes with it")
    text = isles(lab, "train", "never.yaml", expected=ExitCode.PREFLIGHT)
    assert "gone.jsonl" in text and "sky down --yes other" in text, text
    until(lambda: not sh(lab, "ctl", "squeue --noheader"), "no job of Slurm is left")
    assert_nothing_left(lab, NODES)

"""examples/cluster_train as its document has it: two nodes by hand, under Slurm and under PBS."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.deadline import DEADLINE_S
from tests.lab.home import sh, until
from tests.lab.hosts import Lab, hosts
from tests.lab.pbs import pbs
from tests.lab.slurm import job_fields, slurm
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cluster_train"
NODES = ("a1", "a2")
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

# In the place of cluster_train.sh: the words that a job gives it on a node.
WORDS = """\
#!/bin/bash
echo "$(hostname) $* $BACKEND $PWD" >>"words-$3"
[ "$3" != "${FAILS-}" ] || exit 4
"""


def copy(folder: Path, **texts: str) -> Path:
    """The example in a folder of its own, with some of its files written anew."""
    shutil.copytree(EXAMPLE, folder)
    for name, text in texts.items():
        path = folder / name.replace("__", ".")
        path.write_text(text)
        path.chmod(0o755)
    return folder


def by_hand(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """cluster_train.sh, typed on one node."""
    environ = {"PATH": PATH, "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        ["./cluster_train.sh", *words],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=DEADLINE_S)
    return text


@pytest.mark.long
def test_two_nodes_typed_by_hand(tmp_path: Path) -> None:
    """The worker first, as happens; what it prints, its log, and the model that they train."""
    folder, port = copy(tmp_path / "example"), str(free_port())
    words = ("config/train_config.yaml", "2")
    both = {"BACKEND": "gloo", "NPROC_PER_NODE": "1"}
    worker = by_hand(folder, *words, "1", "127.0.0.1", port, LOG_LEVEL="DEBUG", **both)
    master = by_hand(folder, *words, "0", "127.0.0.1", port, **both)
    texts = [said(master), said(worker)]
    assert (master.returncode, worker.returncode) == (0, 0), texts
    logs = folder / "logs" / "distributed_training"
    for node, text in enumerate(texts):
        assert (logs / f"latest_node{node}.log").read_text() == text
        checks = re.findall(r"check (\d)/5 ([^:]+):", text)
        names = ("configuration", "environment", "GPUs and memory", "network")
        assert checks == [*zip("1234", names, strict=True), ("5", "PyTorch distributed")]
        assert "ranks: 2, an all-reduce over gloo is right" in text
    assert f"node 0 answers at 127.0.0.1:{port}" in texts[1]
    assert "NCCL_DEBUG=INFO" in texts[1] and "[DEBUG]" not in texts[0]
    losses = [float(loss) for loss in re.findall(r"epoch \d/3 loss (\S+)", texts[0])]
    assert len(losses) == 3 and losses[-1] < losses[0] / 10
    state = torch.load(folder / "outputs" / "phase2" / "checkpoint.pt")
    assert state["epoch"] == 3
    model = torch.load(folder / "outputs" / "phase2" / "model.pt")
    assert all(torch.equal(value, state["model"][name]) for name, value in model.items())
    loop = 'for i in {0..1}; do\n echo "=== Node $i ==="\n'
    loop += "tail -n 5 logs/distributed_training/latest_node$i.log\ndone"
    shown = subprocess.run(["bash", "-c", loop], cwd=folder, capture_output=True, check=True)
    assert shown.stdout.decode().count("training has finished") == 2


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with hosts(tmp_path_factory.mktemp("example"), len(NODES)) as lab:
        yield lab


@pytest.mark.long
def test_a_slurm_job(lab: Lab) -> None:
    """A real Slurm starts one task a node, and every node has its own number."""
    folder = copy(lab.shared / "slurm", cluster_train__sh=WORDS)
    line = "cd /shared/slurm && BACKEND=gloo sbatch --parsable --gres=none cluster_train.sbatch"
    over = ("COMPLETED", "FAILED", "CANCELLED")
    with slurm(lab):
        job = sh(lab, "ctl", line).strip()
        until(lambda: job_fields(lab, job)["JobState"] in over, "the job ends")
        fields = job_fields(lab, job)
    said = (folder / f"slurm-{job}.out").read_text()
    assert (fields["JobState"], fields["JobName"]) == ("COMPLETED", "purrsight-phase2"), said
    assert (fields["NumNodes"], fields["TimeLimit"]) == ("2", "1-00:00:00")
    assert_words(lab, folder, port=29500 + int(job) % 100)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flavour", "file", "fails"),
    [("torque", "cluster_train.pbs", ""), ("openpbs", "cluster_train_openpbs.pbs", "1")],
)
def test_a_pbs_job(lab: Lab, flavour: str, file: str, fails: str) -> None:
    """Also with four lines of the node file for each host, every node is called once, by its
    number; and the exit code of one that fails is the job's."""
    folder = copy(lab.shared / f"pbs-{flavour}", cluster_train__sh=WORDS)
    # The stand-in's nodes have two GPUs.
    script = (folder / file).read_text().replace("gpus=4", "gpus=2")
    (folder / file).write_text(script)
    with pbs(lab, NODES, flavour):
        line = f"cd /shared/{folder.name} && FAILS={fails} BACKEND=gloo qsub {file}"
        job = sh(lab, "ctl", line).strip()
        code = until(lambda: ended(lab, job), "the job ends")
    number = job.partition(".")[0]
    output = (folder / f"purrsight-phase2.o{number}").read_text()
    assert code == ("4" if fails else "0"), output
    assert ("node 1 (a2) has ended with 4" in output) == bool(fails)
    assert_words(lab, folder, port=29500 + int(number) % 100)


def assert_words(lab: Lab, folder: Path, port: int) -> None:
    """Every node was called once, with its own number and the address of the first."""
    assert {path.name for path in folder.glob("words-*")} == {"words-0", "words-1"}
    for rank, host in enumerate(NODES):
        words = f"config/train_config.yaml 2 {rank} {lab.address('a1')} {port}"
        found = (folder / f"words-{rank}").read_text()
        assert found == f"{host} {words} gloo /shared/{folder.name}\n"


def ended(lab: Lab, job: str) -> str:
    """The exit code of a job, once there is one."""
    found = re.search(r"xit_status = (\S+)", sh(lab, "ctl", f"qstat -x -f {job}"))
    return found[1] if found else ""

"""examples/cluster_train as its document has it: two nodes by hand, under Slurm and under PBS."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.deadline import run_program
from tests.documents import ROOT
from tests.e2e.typed import run_typed
from tests.lab.home import sh, until
from tests.lab.hosts import Lab
from tests.lab.pbs import pbs
from tests.lab.slurm import job_fields, slurm, wait_for_job
from tests.ports import free_port

pytestmark = pytest.mark.long

NODES = ("a1", "a2")
NUM_HOSTS = len(NODES)

# In the place of cluster_train.sh: the words that a job gives it on a node.
WORDS = """\
#!/bin/bash
echo "$(hostname) $* $BACKEND $PWD" >>"words-$3"
[ "$3" != "${FAILS-}" ] || exit 4
"""


def copy(folder: Path) -> Path:
    """The example in a folder of its own."""
    shutil.copytree(ROOT / "examples" / "cluster_train", folder)
    return folder


def test_two_nodes_typed_by_hand(tmp_path: Path) -> None:
    """The worker first, as happens; what it prints, its log, and the model that they train."""
    folder, port = copy(tmp_path / "example"), str(free_port())
    line = "BACKEND=gloo NPROC_PER_NODE=1 {} ./cluster_train.sh config/train_config.yaml 2 {}"
    worker, master = (
        line.format(variable, f"{node} 127.0.0.1 {port}")
        for node, variable in ((1, "LOG_LEVEL=DEBUG"), (0, ""))
    )
    texts = run_typed(folder, worker, master)[::-1]
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
    assert run_program(["bash", "-c", loop], folder).stdout.count("training has finished") == 2


def test_a_slurm_job(lab: Lab) -> None:
    """A real Slurm starts one task a node, and every node has its own number."""
    folder = copy(lab.shared / "slurm")
    (folder / "cluster_train.sh").write_text(WORDS)
    line = "cd /shared/slurm && BACKEND=gloo sbatch --parsable --gres=none cluster_train.sbatch"
    with slurm(lab):
        job = sh(lab, "ctl", line).strip()
        wait_for_job(lab, job)
        fields = job_fields(lab, job)
    said = (folder / f"slurm-{job}.out").read_text()
    assert (fields["JobState"], fields["JobName"]) == ("COMPLETED", "purrsight-phase2"), said
    assert (fields["NumNodes"], fields["TimeLimit"]) == ("2", "1-00:00:00")
    assert_words(lab, folder, port=29500 + int(job) % 100)


@pytest.mark.parametrize(
    ("flavor", "file", "fails"),
    [("torque", "cluster_train.pbs", ""), ("openpbs", "cluster_train_openpbs.pbs", "1")],
)
def test_a_pbs_job(lab: Lab, flavor: str, file: str, fails: str) -> None:
    """Also with four lines of the node file for each host, every node is called once, by its
    number; and the exit code of one that fails is the job's."""
    folder = copy(lab.shared / f"pbs-{flavor}")
    (folder / "cluster_train.sh").write_text(WORDS)
    # The stand-in's nodes have two GPUs.
    (folder / file).write_text((folder / file).read_text().replace("gpus=4", "gpus=2"))

    def code_of(job: str) -> str:
        """Its exit code, once there is one."""
        found = re.search(r"xit_status = (\S+)", sh(lab, "ctl", f"qstat -x -f {job}"))
        return found[1] if found else ""

    with pbs(lab, NODES, flavor):
        line = f"cd /shared/{folder.name} && FAILS={fails} BACKEND=gloo qsub {file}"
        job = sh(lab, "ctl", line).strip()
        code = until(lambda: code_of(job), "the job ends")
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

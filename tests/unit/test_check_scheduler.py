"""What schedulers say, by small programs on PATH: partitions, nodes, GPUs, times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.check.finding import Finding
from isles.check.scheduler import queue_findings
from isles.config.sections.cluster import ClusterConfig, PbsLauncherConfig, SlurmLauncherConfig
from isles.launch.ssh.shell import Shell
from tests.each import each
from tests.programs import program

PARTITIONS = """\
PartitionName=gpu AllowAccounts=ALL Default=YES MaxTime=1-00:00:00 State=UP Nodes=n[1-4]
PartitionName=old AllowAccounts=lab Default=NO MaxTime=UNLIMITED State=DOWN Nodes=n9
"""
NODES = """\
n1|idle|gpu:a100:4(S:0-1)|a100,ib|none
n2|mixed|gpu:a100:4|a100,ib|none
n3|drained|gpu:a100:4|a100|bad fan
n4|idle*|gpu:2|v100|Not responding
"""
QUEUES = """\
Queue: gpuq
    queue_type = Execution
    resources_max.walltime = 24:00:00
    enabled = True
    started = True

Queue: shut
    enabled = False
    started = True
"""
PBS_NODES = """\
n1
     Mom = n1
     state = free
     resources_available.ngpus = 4

n2
     state = offline,down
     comment = disk
     resources_available.ngpus = 4
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    program(tmp_path, "scontrol", {"show partition": PARTITIONS})
    program(tmp_path, "sinfo", {"-p gpu": NODES})
    return tmp_path


def ask_slurm(slurm: Path, nodes: int = 2, gpus: int = 4, **launcher: Any) -> list[Finding]:
    cluster = ClusterConfig(nodes=nodes, gpus_per_node=gpus)
    section = SlurmLauncherConfig(bin_path=str(slurm), **launcher)
    return queue_findings(cluster, section, Shell())


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.id: finding.level for finding in findings}


def of(findings: list[Finding], finding_id: str) -> Finding:
    return next(finding for finding in findings if finding.id == finding_id)


def test_slurm_has_room(slurm: Path) -> None:
    found = ask_slurm(slurm, time=3600.0)
    assert levels(found) == {
        "queue.commands": "ok",
        "queue.partition": "ok",
        "queue.nodes": "warning",
        "queue.gres": "ok",
        "queue.time": "ok",
    }
    nodes = of(found, "queue.nodes")
    assert "n3 is drained (bad fan)" in nodes.text and "n4 is idle*" in nodes.text
    assert "State=RESUME" in nodes.fix


@each(
    ("asked", "finding_id", "words"),
    [
        ({"nodes": 3}, "queue.nodes", "2 of 4 nodes"),
        ({"gpus": 8}, "queue.gres", "the most that one has is 4"),
        ({"constraint": "v100", "nodes": 1, "gpus": 1}, "queue.nodes", "0 of 1"),
        ({"partition": "gpuu"}, "queue.partition", "no partition gpuu"),
        ({"partition": "old"}, "queue.partition", "old is DOWN"),
        ({"time": 172_800.0}, "queue.time", "2d 00h"),
    ],
)
def test_slurm_would_refuse(
    slurm: Path, asked: dict[str, Any], finding_id: str, words: str
) -> None:
    found = of(ask_slurm(slurm, **asked), finding_id)
    assert found.level == "error"
    assert words in found.text and found.fix


def test_slurm_that_is_not_there_or_does_not_answer(tmp_path: Path) -> None:
    (found,) = ask_slurm(tmp_path)
    assert found.id == "queue.commands" and "bin_path" in found.fix
    program(tmp_path, "scontrol", {})
    (found,) = ask_slurm(tmp_path)
    assert "not known" in found.text and "scontrol ping" in found.fix


@pytest.fixture
def pbs(tmp_path: Path) -> Path:
    server = "Server: head\n    default_queue = gpuq\n"
    program(tmp_path, "qstat", {"-Qf": QUEUES, "-Bf": server})
    program(tmp_path, "pbsnodes", {"-a": PBS_NODES})
    return tmp_path


@each(
    ("nodes", "launcher", "expected"),
    [
        (1, {}, {"queue.nodes": "warning", "queue.gres": "ok", "queue.partition": "ok"}),
        (2, {}, {"queue.nodes": "error", "queue.gres": "error"}),
        (1, {"time": 90_000.0}, {"queue.time": "error"}),
        (1, {"queue": "none"}, {"queue.partition": "error"}),
        (1, {"queue": "shut"}, {"queue.partition": "error"}),
    ],
)
def test_pbs(pbs: Path, nodes: int, launcher: dict[str, Any], expected: dict[str, str]) -> None:
    cluster = ClusterConfig(nodes=nodes, gpus_per_node=4)
    section = PbsLauncherConfig(bin_path=str(pbs), **launcher)
    found = queue_findings(cluster, section, Shell())
    assert expected.items() <= levels(found).items()
    if "queue.nodes" in expected:
        assert "n2 is offline,down (disk)" in of(found, "queue.nodes").text
        assert "pbsnodes -r n2" in of(found, "queue.nodes").fix

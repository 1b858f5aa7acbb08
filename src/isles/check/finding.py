"""What a check finds: its id, how it is, and the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isles.errors import ExitCode

Level = Literal["ok", "warning", "error"]
_ORDER: dict[Level, int] = {"error": 0, "warning": 1, "ok": 2}

MEANINGS = {
    # Reaching a host
    "ssh.connect": "ssh reaches the host, without a password",
    "python.runs": "the Python of the run file can be started there",
    "isles.installed": "that Python has isles",
    "host.answers": "the host answers every question in time",
    "host.duplicate": "two names are two machines",
    "host.unseen": "hosts that cannot be asked from here",
    "step.nodes": "all nodes of an allocation come to the check",
    # What is installed
    "os.kernel": "operating system and kernel",
    "packages.missing": "what training needs is installed",
    "version.python": "the same Python everywhere",
    "version.isles": "the same isles everywhere",
    "version.torch": "the same torch everywhere, and the one that is installed",
    "version.transformers": "the same transformers everywhere",
    "version.packages": "the same versions of further packages",
    "version.cuda": "torch is built for the same CUDA everywhere",
    "version.nccl": "the same NCCL everywhere",
    "version.driver": "the same driver of the GPUs everywhere",
    "torch.imports": "torch can be imported",
    # GPUs
    "gpu.driver": "nvidia-smi answers",
    "gpu.count": "as many GPUs as the run has ranks there",
    "gpu.visible": "torch can use the GPUs",
    "gpu.kernel": "a kernel runs on each GPU, with the right result",
    "gpu.errors": "no uncorrected memory errors, no failed rows",
    "gpu.throttle": "no GPU is slowed down by heat or power",
    "gpu.busy": "nobody else uses the GPUs",
    # The machine
    "memory.free": "enough free memory",
    "memory.swap": "the machine does not live on swap",
    "cpu.cores": "a core for each rank, and an idle machine",
    "shm.size": "enough /dev/shm",
    "limits.nofile": "limit of open files",
    "limits.memlock": "limit of locked memory",
    "limits.nproc": "limit of processes",
    "clock.skew": "the clocks agree",
    # Files
    "files.workdir": "the working folder is there",
    "files.output": "the output folder can be written",
    "files.model": "the model is there",
    "files.data": "the data is there",
    "files.script": "the training script is there",
    "files.shared": "whether the output folder is one and the same on all hosts",
    "disk.free": "enough space for checkpoints and caches",
    "disk.inodes": "room for more files",
    "hub.access": "the Hugging Face hub can be reached for what the run file names",
    "hub.licence": "this account may read what the run file names",
    # Between hosts
    "address.dhcp": "addresses that stay",
    "net.names": "host names lead to the hosts",
    "net.interface": "the address and interface that the ranks will use",
    "net.connect": "TCP between each two hosts: the run's port, and any other",
    "net.mtu": "packets of full size arrive",
    "net.latency": "round trips and lost packets",
    "net.bandwidth": "bytes a second between each two hosts",
    "net.rendezvous": "the cluster's head reaches the rendezvous of the clusters",
    "reduce.works": "a real all-reduce over all ranks",
    "reduce.speed": "bandwidth of the all-reduce",
    # Training
    "train.smoke": "three steps of a small model on each machine alone",
    # Queues
    "queue.commands": "the scheduler's commands answer",
    "queue.partition": "the partition or queue is there, and open",
    "queue.nodes": "enough nodes of it are up",
    "queue.account": "account and quality of service are valid",
    "queue.time": "the time limit fits",
    "queue.gres": "the nodes have the GPUs that are asked for",
}
"""Id -> what is right when the check is ok. docs/check.md says more of each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and how it is.

    Args:
        id: which check; docs/check.md has a row for each.
        level: an error keeps a run from starting or from staying well; a warning may.
        where: host, pair of hosts, or place in the run file.
        text: what is so, in words.
        measured: the value.
        limit: what it should be.
        fix: what to do, or the line to type.
    """

    id: str
    level: Level
    where: str
    text: str
    measured: str = ""
    limit: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.id in MEANINGS, self.id


def summary(findings: Sequence[Finding]) -> dict[str, int]:
    """How many of each level."""
    counts = Counter(finding.level for finding in findings)
    return {"ok": counts["ok"], "warnings": counts["warning"], "errors": counts["error"]}


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """What the command ends with: warnings do not count."""
    bad = any(finding.level == "error" for finding in findings)
    return ExitCode.PREFLIGHT if bad else ExitCode.OK


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, otherwise as they came."""
    return sorted(findings, key=lambda finding: _ORDER[finding.level])


def record(findings: Sequence[Finding], *, seconds: float) -> dict[str, Any]:
    """As `--json` and a run's check.json have them."""
    return {
        "summary": {**summary(findings), "seconds": round(seconds, 1)},
        "findings": [asdict(finding) for finding in ordered(findings)],
    }

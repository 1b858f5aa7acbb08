"""What a check finds: its id, how it is, and the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isles.errors import ExitCode

Level = Literal["ok", "warning", "error"]
_ORDER: dict[Level, int] = {"error": 0, "warning": 1, "ok": 2}

IDS = (
    # Reaching a host
    *("ssh.connect", "python.runs", "isles.installed", "host.answers", "host.duplicate"),
    *("host.unseen", "step.nodes"),
    # What is installed
    *("os.kernel", "packages.missing", "version.python", "version.isles", "version.torch"),
    *("version.transformers", "version.packages", "version.cuda", "version.nccl"),
    *("version.driver", "torch.imports"),
    # GPUs
    *("gpu.driver", "gpu.count", "gpu.visible", "gpu.kernel", "gpu.errors", "gpu.throttle"),
    "gpu.busy",
    # The machine
    *("memory.free", "memory.swap", "cpu.cores", "shm.size", "limits.nofile", "limits.memlock"),
    *("limits.nproc", "clock.skew"),
    # Files
    *("files.workdir", "files.output", "files.model", "files.data", "files.script"),
    *("files.shared", "disk.free", "disk.inodes", "hub.access", "hub.licence"),
    # Between hosts
    *("address.dhcp", "net.names", "net.interface", "net.connect", "net.mtu", "net.latency"),
    *("net.bandwidth", "net.rendezvous", "reduce.works", "reduce.speed"),
    # Training
    "train.smoke",
    # Queues
    *("queue.commands", "queue.partition", "queue.nodes", "queue.account", "queue.time"),
    "queue.gres",
)
"""Of all findings; docs/check.md has a row for each, in this order."""


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
        assert self.id in IDS, self.id


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

"""Findings of a check: their ids and levels, and the report as text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.text import Text

from isles.errors import ExitCode

Level = Literal["ok", "warning", "error"]
_WORST_FIRST: tuple[Level, ...] = ("error", "warning", "ok")
_SIGNS: dict[Level, str] = {"ok": "✓", "warning": "!", "error": "✗"}
_PLAIN: dict[Level, str] = {"ok": "ok", "warning": "!!", "error": "XX"}
_COLORS: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "red"}
_ID_CHARS, _CELL_CHARS = 22, 18
_MANY_HOSTS = 5

IDS = (
    # Reaching a host
    *("ssh.connect", "python.runs", "isles.installed", "host.answers", "host.duplicate"),
    *("host.unseen", "step.nodes", "container.runtime", "container.image"),
    # What is installed
    *("os.kernel", "packages.missing", "version.python", "version.isles", "version.torch"),
    *("version.transformers", "version.packages", "version.cuda", "version.nccl"),
    *("version.driver", "torch.imports"),
    # GPUs
    *("gpu.driver", "gpu.count", "gpu.visible", "gpu.kernel", "gpu.precision", "gpu.errors"),
    *("gpu.throttle", "gpu.busy", "gpu.links"),
    # The machine
    *("memory.free", "cpu.cores", "shm.size", "limits.nofile", "limits.memlock", "limits.nproc"),
    "clock.skew",
    # Files
    *("files.workdir", "files.output", "files.model", "files.data", "files.script"),
    *(
        "files.shared",
        "disk.free",
        "disk.inodes",
        "huggingface.access",
        "huggingface.license",
        "data.rows",
    ),
    # Between hosts
    *("address.dhcp", "net.interface", "net.connect", "net.mtu", "net.latency"),
    *("net.bandwidth", "net.hub", "reduce.works", "reduce.speed"),
    # Training
    "train.smoke",
    # Queues
    *("queue.commands", "queue.partition", "queue.nodes", "queue.time", "queue.gres"),
)
"""Ids of all findings. docs/checks.md has a row for each, in this order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        id: id of the check; docs/checks.md has a row for each.
        level: an error prevents a run, or makes it slow. A warning may do so.
        where: host, pair of hosts, or place in the run file.
        measured, limit: the value, and the required value.
        fix: what to do, or the command to run.
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


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Exit code of the command. Warnings do not count."""
    bad = any(finding.level == "error" for finding in findings)
    return ExitCode.PREFLIGHT if bad else ExitCode.OK


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Findings with the worst first, otherwise in their order."""
    return sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.level))


def record(findings: Sequence[Finding], *, seconds: float) -> dict[str, Any]:
    """The record for `--json` and for a run's check.json."""
    counts = Counter(finding.level for finding in findings)
    summary = {"ok": counts["ok"], "warnings": counts["warning"], "errors": counts["error"]}
    return {
        "summary": {**summary, "seconds": round(seconds, 1)},
        "findings": [asdict(finding) for finding in ordered(findings)],
    }


def report_lines(
    findings: Sequence[Finding], hosts: Sequence[str], *, seconds: float, is_terminal: bool
) -> list[Text]:
    """A table over the hosts, and the details of warnings and errors.

    Args:
        hosts: columns of the table, in order.
        seconds: duration of the check.
        is_terminal: use symbols and colors. If not, plain ASCII.
    """
    lines = [*_table(findings, hosts, is_terminal), Text()]
    elsewhere = [f for f in findings if f.where not in hosts and f.level == "ok"]
    ok = _mark("ok", is_terminal)
    lines += [Text.assemble(ok, f" {f.id:<21} {f.where}: {f.text}") for f in elsewhere]
    lines += [Text()] if elsewhere else []
    for finding in ordered(findings):
        if finding.level == "ok":
            continue
        text = finding.text.replace("\n", "\n    ")
        mark = _mark(finding.level, is_terminal)
        lines.append(Text.assemble(mark, f" {finding.id}  {finding.where}: {text}"))
        if finding.fix:
            lines.append(Text(f"    fix: {finding.fix}"))
    lines += [Text()] if lines[-1] else []
    counts = Counter(finding.level for finding in findings)
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    bad = [
        f"{counts[level] or 'no'} {level}{'' if counts[level] == 1 else 's'}"
        for level in _WORST_FIRST[:2]
    ]
    return [
        *lines,
        Text(f"{where}: {', '.join(bad)}, {counts['ok']} ok, in {max(0.1, seconds):.1f} s"),
    ]


def _table(findings: Sequence[Finding], hosts: Sequence[str], is_terminal: bool) -> list[Text]:
    # A row for each check of a host, and a column for each host. The worst finding is shown.
    cells: dict[str, dict[str, Finding]] = {}
    for finding in findings:
        if finding.where in hosts:
            row = cells.setdefault(finding.id, {})
            row[finding.where] = ordered([row.get(finding.where, finding), finding])[0]
    if not cells:
        return []
    rows = cells.values()
    widths = {
        host: 2 + max(len(host), *(len(_cell(row.get(host), hosts, is_terminal)) for row in rows))
        for host in hosts
    }
    head = " " * _ID_CHARS + "".join(f"{host:<{widths[host]}}" for host in hosts)
    lines = [Text(head.rstrip())]
    for finding_id, row in cells.items():
        line = Text(f"{finding_id:<{_ID_CHARS}}")
        for host in hosts:
            cell = f"{_cell(row.get(host), hosts, is_terminal):<{widths[host]}}"
            sign, space, value = cell.partition(" ")
            line.append_text(_mark(row[host].level, is_terminal) if host in row else Text(sign))
            line.append(space + value)
        line.rstrip()
        lines.append(line)
    return lines


def _cell(finding: Finding | None, hosts: Sequence[str], is_terminal: bool) -> str:
    # With one host, print the whole value. With many hosts, print no value.
    if finding is None:
        return ""
    sign, value = (_SIGNS if is_terminal else _PLAIN)[finding.level], finding.measured
    if len(hosts) > _MANY_HOSTS:
        return sign
    if len(hosts) > 1 and len(value) > _CELL_CHARS:
        value = f"{value[: _CELL_CHARS - 3]}..."
    return f"{sign} {value}"


def _mark(level: Level, is_terminal: bool) -> Text:
    return Text(_SIGNS[level], _COLORS[level]) if is_terminal else Text(_PLAIN[level])

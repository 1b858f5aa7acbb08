"""Findings as text: a table over the hosts, and in full what is not well."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from isles.check.finding import Finding, Level, ordered, summary

_SIGNS: dict[Level, str] = {"ok": "✓", "warning": "!", "error": "✗"}
_PLAIN: dict[Level, str] = {"ok": "ok", "warning": "!!", "error": "XX"}
_COLOURS: dict[Level, str] = {"ok": "32", "warning": "33", "error": "31"}
_WORST: dict[Level, int] = {"ok": 0, "warning": 1, "error": 2}
_WIDTH, _LEAST, _MANY = 22, 18, 5


def report_lines(
    findings: Sequence[Finding], hosts: Sequence[str], *, seconds: float, is_terminal: bool
) -> list[str]:
    """The report.

    Args:
        findings: all of them.
        hosts: the columns of the table, in order.
        seconds: that the check has taken.
        is_terminal: signs and colours, not plain ASCII.
    """
    lines = [*_table(findings, hosts, is_terminal), ""]
    elsewhere = [f for f in findings if f.where not in hosts and f.level == "ok"]
    lines += [f"{_mark('ok', is_terminal)} {f.id:<21} {f.where}: {f.text}" for f in elsewhere]
    lines += [""] if elsewhere else []
    for finding in ordered(findings):
        if finding.level == "ok":
            continue
        text = finding.text.replace("\n", "\n    ")
        lines.append(f"{_mark(finding.level, is_terminal)} {finding.id}  {finding.where}: {text}")
        if finding.fix:
            lines.append(f"    fix: {finding.fix}")
    lines += [] if lines[-1] == "" else [""]
    return [*lines, _last(findings, hosts, seconds)]


def _last(findings: Sequence[Finding], hosts: Sequence[str], seconds: float) -> str:
    counts = summary(findings)
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return (
        f"{where}: {_number(counts['errors'], 'error')}, "
        f"{_number(counts['warnings'], 'warning')}, {counts['ok']} ok, in {seconds:.1f} s"
    )


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _table(findings: Sequence[Finding], hosts: Sequence[str], is_terminal: bool) -> list[str]:
    # A row for each check that was made on a host, a column for each host.
    cells: dict[str, dict[str, Finding]] = {}
    for finding in findings:
        if finding.where not in hosts:
            continue
        row = cells.setdefault(finding.id, {})
        known = row.get(finding.where)
        if known is None or _WORST[finding.level] > _WORST[known.level]:
            row[finding.where] = finding
    if not cells:
        return []
    rows = cells.values()
    widths = {
        host: 2 + max(len(host), *(len(_cell(row.get(host), hosts, is_terminal)) for row in rows))
        for host in hosts
    }
    lines = [(" " * _WIDTH + "".join(f"{host:<{widths[host]}}" for host in hosts)).rstrip()]
    for finding_id, row in cells.items():
        line = f"{finding_id:<{_WIDTH}}"
        for host in hosts:
            cell = f"{_cell(row.get(host), hosts, is_terminal):<{widths[host]}}"
            sign, space, value = cell.partition(" ")
            line += (_mark(row[host].level, is_terminal) if host in row else sign) + space + value
        lines.append(line.rstrip())
    return lines


def _cell(finding: Finding | None, hosts: Sequence[str], is_terminal: bool) -> str:
    # A value is whole where there is one host, and left out where there are many; on a terminal
    # several hosts share the line.
    if finding is None:
        return ""
    sign, value = (_SIGNS if is_terminal else _PLAIN)[finding.level], finding.measured
    if len(hosts) > _MANY:
        return sign
    columns = shutil.get_terminal_size().columns if is_terminal else 0
    room = max(_LEAST, (columns - _WIDTH) // len(hosts) - 4)
    if len(hosts) > 1 and len(value) > room:
        end = "…" if is_terminal else "..."
        value = value[: room - len(end)] + end
    return f"{sign} {value}"


def _mark(level: Level, is_terminal: bool) -> str:
    if not is_terminal:
        return _PLAIN[level]
    return f"\033[{_COLOURS[level]}m{_SIGNS[level]}\033[0m"

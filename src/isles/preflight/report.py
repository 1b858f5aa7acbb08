"""Findings as text: a table over the hosts, and in full what is not well."""

from __future__ import annotations

from collections.abc import Sequence

from isles.preflight.finding import Finding, Level, ordered, summary

_SIGNS: dict[Level, str] = {"ok": "✓", "warning": "!", "error": "✗"}
_PLAIN: dict[Level, str] = {"ok": "ok", "warning": "!!", "error": "XX"}
_COLOURS: dict[Level, str] = {"ok": "32", "warning": "33", "error": "31"}
_WORST: dict[Level, int] = {"ok": 0, "warning": 1, "error": 2}
_WIDTH, _MANY = 22, 5


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
    """A row for each check that was made on a host, a column for each host."""
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
    # Values where they fit; of many hosts the signs alone.
    width = _WIDTH if len(hosts) <= _MANY else max(4, *(len(host) + 2 for host in hosts))
    head = " " * 22 + "".join(f"{host[: width - 1]:<{width}}" for host in hosts)
    lines = [head.rstrip()]
    for finding_id, row in cells.items():
        texts = [_cell(row.get(host), width, len(hosts), is_terminal) for host in hosts]
        lines.append(f"{finding_id:<22}{''.join(texts)}".rstrip())
    return lines


def _cell(finding: Finding | None, width: int, num_hosts: int, is_terminal: bool) -> str:
    if finding is None:
        return " " * width
    value = finding.measured if num_hosts <= _MANY else ""
    room = width - 4
    value = value if len(value) <= room else value[: room - 1] + ("…" if is_terminal else ".")
    sign = (_SIGNS if is_terminal else _PLAIN)[finding.level]
    return f"{_mark(finding.level, is_terminal)} {value}" + " " * (
        width - len(sign) - 1 - len(value)
    )


def _mark(level: Level, is_terminal: bool) -> str:
    if not is_terminal:
        return _PLAIN[level]
    return f"\033[{_COLOURS[level]}m{_SIGNS[level]}\033[0m"

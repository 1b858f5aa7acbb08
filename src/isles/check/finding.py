"""What a check found: one line of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isles.check.ids import MEANINGS
from isles.errors import ExitCode

Level = Literal["ok", "warning", "error"]
_ORDER: dict[Level, int] = {"error": 0, "warning": 1, "ok": 2}


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

"""Steps that took far too long, as the watchdogs of the ranks have put them on record."""

from __future__ import annotations

import re
from typing import Any

from isles.facts.units import format_duration
from isles.rundir.paths import Attempt
from isles.rundir.records import read_record
from isles.rundir.state import number_of

_LISTED = 3
_RECORD = re.compile(r"step-(\d+)\.json")


def stall_texts(attempt: Attempt) -> tuple[str, ...]:
    """The last stalls of an attempt, oldest first: which rank held up the step, and where."""
    if not attempt.stalls.is_dir():
        return ()
    steps = sorted(
        int(match[1]) for p in attempt.stalls.iterdir() if (match := _RECORD.fullmatch(p.name))
    )
    records = (read_record(attempt.stalls / f"step-{step}.json") for step in steps[-_LISTED:])
    return tuple(_text(attempt, record) for record in records if record is not None)


def _text(attempt: Attempt, record: dict[str, Any]) -> str:
    took_s = number_of(record, "went_on_after_s")
    end = f"stacks of the ranks: {attempt.stalls}"
    if took_s is not None:
        end = f"it went on after {format_duration(took_s)}"
    return f"{record.get('text')}; {end}"

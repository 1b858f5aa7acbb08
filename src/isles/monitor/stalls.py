"""Steps that took far too long, as the watchdogs of the ranks have put them on record."""

from __future__ import annotations

import re
from typing import Any

from isles.facts.units import format_duration
from isles.run.paths import Attempt
from isles.run.records import read_record
from isles.run.state import number_of

_LISTED = 3
_RECORD = re.compile(r"(?:step|silence)-\d+\.json")


def stall_texts(attempt: Attempt) -> tuple[str, ...]:
    """The last stalls of an attempt, oldest first: which rank held up the step, and where."""
    if not attempt.stalls.is_dir():
        return ()
    paths = [path for path in attempt.stalls.iterdir() if _RECORD.fullmatch(path.name)]
    records = [record for path in paths if (record := read_record(path)) is not None]
    records.sort(key=lambda r: (number_of(r, "at") or 0.0, number_of(r, "step") or 0.0))
    return tuple(_text(attempt, record) for record in records[-_LISTED:])


def _text(attempt: Attempt, record: dict[str, Any]) -> str:
    took_s = number_of(record, "went_on_after_s")
    end = f"stacks of the ranks: {attempt.stalls}"
    if took_s is not None:
        end = f"it went on after {format_duration(took_s)}"
    return f"{record.get('text')}; {end}"

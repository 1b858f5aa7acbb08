"""The step of the exported model of a run, and the failure of its last export."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from isles.config.foreign import open_regular
from isles.run.manifest import number_of
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.run.state import number_of as recorded_number
from isles.run.state import text_of

_CARD_BYTES = 1 << 20
_STEPS = re.compile(r"^\| steps \| ([\d,]+) \|$", re.MULTILINE)
"""A row of the model description, which `isles.checkpoint.card` writes."""


def exported_step(folder: Path) -> int | None:
    """The step of an exported model from its model description, or None if unknown."""
    with suppress(OSError), open_regular(folder / "README.md") as file:
        found = _STEPS.search(file.read(_CARD_BYTES).decode(errors="replace"))
        return None if found is None else number_of(found[1].replace(",", ""))
    return None


def export_failure(run_dir: RunDir) -> str:
    """The reason why a finished run has no model of its last step, or empty without a failure."""
    summary = read_record(run_dir.summary) or {}
    error = text_of(summary, "export_error")
    # `isles checkpoint export` may have succeeded since.
    is_there = exported_step(run_dir.model) == recorded_number(summary, "steps")
    return "" if is_there else error


def unsent_reason(run_dir: RunDir) -> str:
    """The reason why RUN/model is not the model of the run, or empty if it is."""
    last = recorded_number(read_record(run_dir.summary), "steps")
    step = exported_step(run_dir.model)
    if step is not None and last is not None and step != last:
        return f"it is of step {step}, and the last step of the run is {last:.0f}"
    failure = export_failure(run_dir)
    return f"the export failed: {failure}" if failure else ""

"""Rows: reads the first rows of each source as training does, in a process with torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from isles.check.finding import Finding
from isles.check.plan import NodePlan
from isles.launch.answers import parse_answer

LONGEST_S = 120.0
"""Timeout for reading the first rows. Most of the time is the import of torch."""


def rows(plan: NodePlan) -> Iterator[Finding]:
    """Findings on the first rows of a run's sources, on the first node."""
    config = None if plan.run is None else plan.run["config"]
    if config is None or not plan.is_first or config["training"]["script"] is not None:
        return
    if all(source["type"] == "fake" for source in config["data"]["sources"]):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "isles.train.first_rows"],
            input=json.dumps(config).encode(),
            capture_output=True,
            # `huggingface` reports missing downloads.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            timeout=LONGEST_S,
            check=False,
        )
        heads = parse_answer(list[dict[str, Any]], done.stdout.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        yield _unseen(plan, f"reading took more than {LONGEST_S:.0f} s")
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        yield _unseen(plan, last[0] if last else f"exit code {done.returncode}")
    else:
        for head in heads:
            yield from _findings(plan, head)


def _unseen(plan: NodePlan, why: str) -> Finding:
    text = f"the rows were not checked: {why}"
    return Finding("data.rows", "ok", plan.name, text, "not checked")


def _findings(plan: NodePlan, head: dict[str, Any]) -> Iterator[Finding]:
    first = f"first {head['rows']} rows"
    where = f"data.sources.{head['number']} ({head['path']})"
    fix = (
        "`isles data show` checks all rows; add to data.sources.ignore_fields the fields that are "
    )
    fix += "not needed"
    for note in head["notes"]:
        yield Finding("data.rows", "warning", plan.name, f"{note}; of the {first}", first, fix=fix)
    if error := head.get("error"):
        text = f"{where}: {error['what']}"
        yield Finding("data.rows", "error", plan.name, text, first, fix=error["fix"])
    elif not head["notes"]:
        text = f"{where}: isles uses every field of the {first}"
        yield Finding("data.rows", "ok", plan.name, text, first)

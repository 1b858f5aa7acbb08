"""Stacks of ranks on hosts with separate disks: reported by agents, kept on the first host.

Ranks of the built-in trainer write them to `hangs/` of the attempt; see `train/hang.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from isles.agent.protocol import log_line
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record, write_text_atomic

_RECENT_S = 20.0
_LONGEST = 200_000
_NAME = re.compile(r"step-\d+(-rank-\d+)?\.(txt|json|nccl\.json)")
_DECISION = re.compile(r"step-\d+\.json")


def new_hang_files(attempt: Attempt) -> dict[str, str]:
    """Names and texts of the files that ranks of this host have written in the last seconds."""
    found = {}
    # A folder that the coordinator sees needs no copy; an old copy could overwrite a newer file.
    if attempt.hangs.is_dir() and not attempt.nodes.exists():
        with suppress(OSError):
            for path in attempt.hangs.iterdir():
                is_recent = abs(time.time() - path.stat().st_mtime) < _RECENT_S
                if is_recent and _NAME.fullmatch(path.name):
                    found[path.name] = path.read_text(errors="replace")[:_LONGEST]
    return found


def keep_hang_files(run_dir: RunDir, attempt: Attempt, reports: Iterable[dict[str, Any]]) -> None:
    """Keep files that agents have reported. A full disk loses only these files."""
    for report in reports:
        for name, text in report.get("hangs", {}).items():
            path = attempt.hangs / name
            with suppress(OSError):
                is_new = not path.exists()
                if not _NAME.fullmatch(name) or not (is_new or path.read_text() != text):
                    continue
                attempt.hangs.mkdir(exist_ok=True)
                write_text_atomic(path, text, durable=False)
                if is_new and _DECISION.fullmatch(name):
                    # If another rank has detected it, rank 0 has not logged it.
                    record = read_record(path) or {}
                    line = f"{record.get('text')}; stacks of the ranks are in {path.parent}"
                    log_line(line)
                    status = read_record(run_dir.status) or {}
                    status["notes"] = [*status.get("notes", ()), line]
                    write_record(run_dir.status, status, durable=False)

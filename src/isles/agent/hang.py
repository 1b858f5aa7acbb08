"""Stacks and hang reports of hosts that have disks of their own: brought to the first host.

They lie in `hangs/` of the attempt; the question for stacks travels the other way. An agent
reports (`HangReports`), the coordinator keeps what is reported (`HangFiles`).
"""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from typing import Any

from isles.agent.protocol import log_line
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record, write_text_atomic

ASKED = "asked.json"
"""In `hangs/`: the number of the last question for stacks."""

PRINTED = "printed"
"""In the attempt's folder on the first host: touched when a rank of another host has printed."""

CARRIED_S = 20.0
"""What a question and its answers need between hosts."""

_LOOK_S = 0.5
_RECENT_S = 20.0
_LONGEST = 200_000
_PRINTED_EVERY_S = 2
_NAME = re.compile(r"rank-\d+\.json|step-\d+(-rank-\d+)?\.(txt|json|nccl\.json)")
_DECISION = re.compile(r"step-\d+\.json")


class HangReports:
    """What an agent reports of the folder `hangs` on its host.

    Args:
        attempt: as this host sees it.
        is_shared: whether the coordinator sees the same folder; else it may still be so.
    """

    def __init__(self, attempt: Attempt, *, is_shared: bool = False) -> None:
        self.is_script = False
        """Whether the ranks are those of a user's own script."""
        self._is_shared = is_shared
        self._attempt = attempt
        self._looked_at = -math.inf
        self._reported: dict[str, Any] = {}

    def report(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """The part of a report: files that are new, and whether the ranks of this node print."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._reported = {}
            with suppress(OSError):
                if files := self._files():
                    self._reported["hangs"] = files
            if self.is_script and (printed := self._printed(ranks)):
                self._reported["printed"] = printed
        return self._reported

    def ask(self, number: int) -> None:
        """Pass on a question of the coordinator for the stacks of the ranks here."""
        path = self._attempt.hangs / ASKED
        with suppress(OSError):
            # On the first host there may be a newer one, of which the command does not know yet.
            if int((read_record(path) or {}).get("number", 0)) < number:
                self._attempt.hangs.mkdir(exist_ok=True)
                write_record(path, {"number": number}, durable=False)

    def _files(self) -> dict[str, str]:
        folder = self._attempt.hangs
        # A folder that the coordinator has as well needs no copy, and an old one would undo a file.
        if self._is_shared or self._attempt.nodes.exists() or not folder.is_dir():
            return {}
        paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
        recent = [p for p in paths if abs(time.time() - p.stat().st_mtime) < _RECENT_S]
        return {p.name: p.read_text(errors="replace")[:_LONGEST] for p in sorted(recent)}

    def _printed(self, ranks: tuple[int, ...]) -> int:
        # Grows when one of the ranks has printed, but not with every line.
        newest = 0.0
        for rank in ranks:
            with suppress(OSError):
                newest = max(newest, self._attempt.rank_log(rank).stat().st_mtime)
        return int(newest) // _PRINTED_EVERY_S


class HangFiles:
    """What the coordinator keeps of these reports, in its own folder `hangs`."""

    def __init__(self, run_dir: RunDir, attempt: Attempt) -> None:
        self.asked = 0
        """Number of the last question for stacks; 0: there was none."""
        self._run_dir = run_dir
        self._attempt = attempt
        self._printed: dict[int, int] = {}
        self._looked_at = -math.inf

    def look(self, reports: dict[int, dict[str, Any]], now_s: float) -> None:
        """Keep what the nodes have reported. A full disk costs the stacks, and nothing else."""
        if now_s - self._looked_at < _LOOK_S:
            return
        self._looked_at = now_s
        with suppress(OSError):
            self.asked = int((read_record(self._attempt.hangs / ASKED) or {}).get("number", 0))
            for node, report in reports.items():
                for name, text in report.get("hangs", {}).items():
                    if _NAME.fullmatch(str(name)):
                        self._keep(str(name), str(text))
                printed = int(report.get("printed", 0))
                if node != 0 and printed != self._printed.get(node, 0):
                    self._printed[node] = printed
                    (self._attempt.path / PRINTED).touch()

    def _keep(self, name: str, text: str) -> None:
        path = self._attempt.hangs / name
        is_new = not path.exists()
        if not is_new and (not name.endswith(".json") or path.read_text() == text):
            return
        self._attempt.hangs.mkdir(exist_ok=True)
        write_text_atomic(path, text, durable=False)
        if is_new and _DECISION.fullmatch(name):
            # Rank 0 does not know of it, where another rank has found it out.
            line = f"{(read_record(path) or {}).get('text')}; stacks of the ranks: {path.parent}"
            log_line(line)
            status = read_record(self._run_dir.status) or {}
            notes = [*status.get("notes", ()), line]
            write_record(self._run_dir.status, {**status, "notes": notes}, durable=False)

"""Carries stacks and decisions of hosts without a common disk to the head, and questions back."""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from typing import Any

from isles.agent.server import say
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record, write_text_atomic

ASKED = "asked.json"
"""In `stalls/`: the number of the last question for stacks."""

PRINTED = "printed"
"""In the attempt's folder on the head: touched when a rank of another host has printed."""

CARRIED_S = 20.0
"""What a question and its answers need between hosts."""

_LOOK_S = 0.5
_RECENT_S = 20.0
_LONGEST = 200_000
_PRINTED_EVERY_S = 2
_NAME = re.compile(r"rank-\d+\.json|step-\d+(-rank-\d+)?\.(txt|json|nccl\.json)")
_DECISION = re.compile(r"step-\d+\.json")


class StallsHere:
    """What an agent reports of the folder `stalls` on its host.

    Args:
        attempt: this start, as this host sees it.
        is_shared: whether the coordinator sees the same folder; else it may still be so.
    """

    def __init__(self, attempt: Attempt, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self.is_script = False
        """Whether the ranks are those of a user's own script."""
        self._attempt = attempt
        self._looked_at = -math.inf
        self._told: dict[str, Any] = {}

    def report(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """The part of a report: files that are new, and whether the ranks of this node print."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._told = {}
            with suppress(OSError):
                if files := self._files():
                    self._told["stalls"] = files
            if self.is_script and (printed := self._printed(ranks)):
                self._told["printed"] = printed
        return self._told

    def ask(self, number: int) -> None:
        """The head wants the stacks of the ranks here."""
        path = self._attempt.stalls / ASKED
        with suppress(OSError):
            # On the head there may be a newer one, of which the order does not know yet.
            if int((read_record(path) or {}).get("number", 0)) < number:
                self._attempt.stalls.mkdir(exist_ok=True)
                write_record(path, {"number": number}, durable=False)

    def _files(self) -> dict[str, str]:
        folder = self._attempt.stalls
        # Where the head has the same folder it needs no copy, and an old one would undo a new file.
        if self._is_shared or self._attempt.nodes.exists() or not folder.is_dir():
            return {}
        paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
        recent = [p for p in paths if abs(time.time() - p.stat().st_mtime) < _RECENT_S]
        return {p.name: p.read_text(errors="replace")[:_LONGEST] for p in sorted(recent)}

    def _printed(self, ranks: tuple[int, ...]) -> int:
        """Grows when one of the ranks has printed, but not with every line."""
        newest = 0.0
        for rank in ranks:
            with suppress(OSError):
                newest = max(newest, self._attempt.rank_log(rank).stat().st_mtime)
        return int(newest) // _PRINTED_EVERY_S


class StallsThere:
    """What the head keeps of it.

    Args:
        run_dir, attempt: the run, on this host.
    """

    def __init__(self, run_dir: RunDir, attempt: Attempt) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._printed: dict[int, int] = {}
        self._looked_at = -math.inf
        self._asked = 0

    @property
    def asked(self) -> int:
        """The number of the last question for stacks; 0: there was none."""
        return self._asked

    def look(self, reports: dict[int, dict[str, Any]], now_s: float) -> None:
        """Keep what the nodes have reported. A full disk costs the stacks, and nothing else."""
        if now_s - self._looked_at < _LOOK_S:
            return
        self._looked_at = now_s
        with suppress(OSError):
            number = (read_record(self._attempt.stalls / ASKED) or {}).get("number", 0)
            self._asked = int(number)
            for node, report in reports.items():
                for name, text in report.get("stalls", {}).items():
                    if _NAME.fullmatch(str(name)):
                        self._keep(str(name), str(text))
                printed = int(report.get("printed", 0))
                if node != 0 and printed != self._printed.get(node, 0):
                    self._printed[node] = printed
                    (self._attempt.path / PRINTED).touch()

    def _keep(self, name: str, text: str) -> None:
        path = self._attempt.stalls / name
        is_new = not path.exists()
        if not is_new and (not name.endswith(".json") or path.read_text() == text):
            return
        self._attempt.stalls.mkdir(exist_ok=True)
        write_text_atomic(path, text, durable=False)
        if is_new and _DECISION.fullmatch(name):
            self._tell((read_record(path) or {}).get("text"))

    def _tell(self, text: Any) -> None:
        """Rank 0 cannot say it, where it was not the one to find out."""
        line = f"{text}; stacks of the ranks: {self._attempt.stalls}"
        say(line)
        status = read_record(self._run_dir.status) or {}
        notes = [*status.get("notes", ()), line]
        write_record(self._run_dir.status, {**status, "notes": notes}, durable=False)

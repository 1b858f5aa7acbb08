"""Watches a user's own script for the coordinator: its status, whether it hangs, and where.

Agents report when their ranks have printed, and answer requests for stacks (`stacks.py`). The
coordinator requests stacks if no rank has reported a step or printed for too long, if a file
`stacks` appears in the folder of the attempt, or if a watcher asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from isles.agent.protocol import log_line
from isles.agent.script.stacks import ENDED, Answer
from isles.config.sections.training import WatchdogConfig
from isles.errors import ExitCode
from isles.facts.units import format_duration
from isles.run.hang import Hang, RankPosition, find_hang
from isles.run.live import StacksRequests
from isles.run.outcome import ErrorRecord, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record, write_text_atomic
from isles.run.restarts import read_last_step

_LOOK_S = 0.5
_HEARTBEAT_S = 5.0
_ANSWER_S = 20.0
"""Longest time for ranks to answer a request for their stacks."""

_KNOWN_STEPS = 3
_FIRST = 5
"""Evaluations and saves of a script look like long steps, so they get more time."""


@dataclass(slots=True)
class Signs:
    """Last report of a step, and last activity of the script, by a monotonic clock."""

    steps: float
    any: float
    num_steps: int = 0
    longest_s: float = 0.0
    """Longest time between two reported steps."""
    seen: tuple[Any, ...] = ()
    """The last step, and when the ranks of each node last printed."""
    last: int | None = None


@dataclass(slots=True)
class _Question:
    """A request to all ranks for their stacks, and its reason."""

    number: int
    why: str
    at: float
    by_hand: bool
    asked_at: float | None
    """Time of a watcher's request, which gets the answers; None if no watcher asked."""
    seen: tuple[Any, ...]


class ScriptWatch:
    """Keeps status.json up to date while a script runs, and detects that it hangs."""

    def __init__(
        self, run_dir: RunDir, attempt: Attempt, script: str, config: WatchdogConfig
    ) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        self._script, self._config = script, config
        self._restart = 0
        self._hosts: list[str] = []
        self._requests = StacksRequests(attempt)
        self._signs = Signs(0.0, 0.0)
        self._number = 0
        self._question: _Question | None = None
        self._hang: tuple[str, float, tuple[Any, ...]] | None = None
        self._looked_at = 0.0

    @property
    def question(self) -> int:
        """Number of the request for stacks that agents must answer; 0: no request."""
        return self._question.number if self._question is not None else 0

    def begin(self, restart: int, hosts: list[str], now_s: float) -> None:
        """Ranks on these hosts are about to start."""
        self._restart, self._hosts = restart, hosts
        self._signs = Signs(now_s, now_s)
        self._question = self._hang = None
        now = time.time()
        status = {"phase": "running", "detail": self._script, "script": self._script}
        self._write({**status, "world_size": len(hosts), "progress_at": now, "updated_at": now})

    def finished(self) -> None:
        status = read_record(self._run_dir.status) or {}
        self._write({**status, "phase": "finished", "detail": "", "updated_at": time.time()})

    def look(self, reports: dict[int, dict[str, Any]], now_s: float) -> ErrorRecord | None:
        """Check the reports of the nodes; returns an error if the script must be ended."""
        if now_s - self._looked_at < _LOOK_S:
            return None
        self._looked_at = now_s
        with suppress(OSError):  # a full disk, or a disk that is unavailable for a moment
            self._keep_fresh()
            self._update_signs(reports, now_s)
            if self._question is not None:
                return self._gather(self._question, reports, now_s)
            request, asked_at = self._attempt.path / "stacks", self._requests.new()
            if request.exists() or asked_at is not None:
                request.unlink(missing_ok=True)
                why = "somebody asked for the stacks"
                self._ask(why, now_s, by_hand=True, asked_at=asked_at)
            elif self._hang is None or self._hang[2] != self._signs.seen:
                self._look(now_s)
        return None

    def _look(self, now_s: float) -> None:
        if self._hang is not None:
            name, since, _ = self._hang
            self._hang, took_s = None, now_s - since
            path = self._attempt.hangs / f"{name}.json"
            write_record(path, {**(read_record(path) or {}), "went_on_after_s": took_s})
            self._note(f"the script continued after {format_duration(took_s)}")
        total = (read_record(self._run_dir.status) or {}).get("total_steps")
        total = int(total) if isinstance(total, int) else None
        if why := overdue(self._signs, self._config, now_s, total):
            self._ask(why, now_s, by_hand=False)

    def _update_signs(self, reports: dict[int, dict[str, Any]], now_s: float) -> None:
        signs, step = self._signs, read_last_step(self._attempt, self._restart)
        if step != signs.last and step is not None:
            if signs.last is not None:
                signs.longest_s = max(signs.longest_s, now_s - signs.steps)
            signs.num_steps += 1
            signs.last, signs.steps = step, now_s
        printed = sorted((node, report.get("printed", 0)) for node, report in reports.items())
        if (seen := (step, *printed)) != signs.seen:
            signs.seen, signs.any = seen, now_s

    def _ask(self, why: str, now_s: float, *, by_hand: bool, asked_at: float | None = None) -> None:
        self._number += 1
        seen = self._signs.seen
        self._question = _Question(self._number, why, now_s, by_hand, asked_at, seen)

    def _gather(
        self, question: _Question, reports: dict[int, dict[str, Any]], now_s: float
    ) -> ErrorRecord | None:
        # Wait for the answers of all ranks, then report.
        given = [report.get("stacks", {}) for report in reports.values()]
        answers: dict[int, Answer] = {}
        for each in given:
            if each.get("number") == question.number:
                answers |= {int(rank): answer for rank, answer in each["ranks"].items()}
        if len(answers) < len(self._hosts) and now_s - question.at < _ANSWER_S:
            return None
        self._question = None
        if question.asked_at is None:
            return self._report(question, answers)
        place = {"step": self._signs.last, "stage": "running"}
        found = {
            rank: {
                "host": self._hosts[rank],
                **place,
                **answer,
                "at": answer["at"] or answer["frozen"],
            }
            for rank, answer in answers.items()
        }
        self._requests.answer(question.asked_at, found)
        return None

    def _report(self, question: _Question, answers: dict[int, Answer]) -> ErrorRecord | None:
        folder, hosts, signs = self._attempt.hangs, self._hosts, self._signs
        step = signs.last or 0
        hang = script_hang(answers, hosts, step)
        folder.mkdir(exist_ok=True)
        name = f"step-{step}" if signs.num_steps else self._free_name("silence")
        name = self._free_name("asked") if question.by_hand else name
        for rank, answer in answers.items():
            waits = f", waiting in {answer['waits_in']}" if answer["waits_in"] else ""
            head = f"rank {rank} on {hosts[rank]}{waits}, {answer['at'] or answer['frozen']}\n\n"
            path = folder / f"{name}-rank-{rank}.txt"
            write_text_atomic(path, head + answer["stacks"], durable=False)
        text = f"{question.why}: {hang.text}"
        self._note(f"{text}; stacks of the ranks are in {folder}")
        if question.by_hand:
            return None
        # Output since the request may be its last, so it must be read.
        self._hang = name, signs.any, question.seen
        record = {"step": step, "text": text, "at": time.time(), "went_on_after_s": None}
        write_record(folder / f"{name}.json", {**record, "root_causes": list(hang.root_causes)})
        if self._config.action != "stop":
            return None
        rank = hang.root_causes[0] if hang.root_causes else 0
        return error_record(
            text,
            id="step.stalled" if signs.num_steps else "script.silent",
            kind="Stalled",
            code=ExitCode.COMMUNICATION,
            where=f"rank {rank} on {hosts[rank]}",
            fix=f"read the stacks of the ranks in {folder}; watchdog.action: report would wait "
            "instead",
            rank=rank,
            host=hosts[rank],
            is_communication=False,
            will_recur=False,
            restart=self._restart,
            is_script=True,
        )

    def _free_name(self, kind: str) -> str:
        names = (path.name for path in self._attempt.hangs.glob(f"{kind}-*"))
        numbers = (int(name.split("-")[1].partition(".")[0]) for name in names)
        return f"{kind}-{max(numbers, default=0) + 1}"

    def _keep_fresh(self) -> None:
        # The status is never older than a few seconds, even if the script reports no steps.
        status, now = read_record(self._run_dir.status) or {}, time.time()
        if now - float(status.get("updated_at", 0.0)) >= _HEARTBEAT_S:
            with suppress(OSError):
                printed_at = self._attempt.rank_log(0).stat().st_mtime
                status["progress_at"] = max(printed_at, float(status.get("progress_at", 0.0)))
            self._write({**status, "updated_at": now})

    def _note(self, text: str) -> None:
        log_line(text)
        status = read_record(self._run_dir.status) or {}
        self._write({**status, "notes": [*status.get("notes", ()), text]})

    def _write(self, status: dict[str, Any]) -> None:
        with suppress(OSError):  # a full disk is for the script's next save to report
            write_record(self._run_dir.status, status, durable=False)


def overdue(signs: Signs, config: WatchdogConfig, now: float, total_steps: int | None) -> str:
    """Reason to assume that the script hangs; empty if it does not.

    Args:
        signs: last signs of progress.
        config: the watchdog's section.
        now: time by the clock of `signs`.
        total_steps: steps of the whole run, if the script has reported them.
    """
    silent_s = now - signs.steps
    is_last = total_steps is not None and (signs.last or 0) >= total_steps
    if signs.num_steps > _KNOWN_STEPS and not is_last:
        limit_s = max(config.min_time * _FIRST, config.slow_factor * signs.longest_s)
        if silent_s > limit_s:
            return (
                f"no step was reported for {format_duration(silent_s)} since step {signs.last} "
                f"(longest time between steps before: {format_duration(signs.longest_s)})"
            )
    if config.max_silence is not None and now - signs.any > config.max_silence:
        return f"no rank has printed or reported anything for {format_duration(now - signs.any)}"
    return ""


def script_hang(answers: Mapping[int, Answer], hosts: list[str], step: int) -> Hang:
    """The ranks that the others wait for, from the answers of their agents."""
    frozen = [rank for rank, answer in answers.items() if answer["frozen"]]
    missing = [rank for rank in range(len(hosts)) if rank not in answers]
    if frozen or missing:
        words = [f"rank {r} on {hosts[r]}: {answers[r]['frozen']}" for r in frozen]
        words += [f"rank {r} on {hosts[r]} does not answer" for r in missing]
        return Hang((*frozen, *missing), "; ".join(words[:3]))
    # A rank that has ended is ahead of the others, and they do not wait for it.
    stands = {
        rank: RankPosition(
            step + (answer["at"] == ENDED), "running", answer["at"], answer["waits_in"]
        )
        for rank, answer in answers.items()
    }
    return find_hang(stands, hosts)

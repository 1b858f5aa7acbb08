"""Notices that a user's own script hangs, and says which rank stands where.

The starter of each rank can have the stacks of its script. That of rank 0 also sees whether any
rank still reports steps or prints, and asks them all when none has for too long, or when somebody
leaves a file `stacks` in the folder of the attempt. They talk through files in `stalls/`; between
hosts without a common disk the agents carry them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from isles.agent.hang import ASKED, CARRIED_S, PRINTED
from isles.agent.script.stacks import ScriptStacks
from isles.config.sections.training import WatchdogConfig
from isles.errors import ExitCode
from isles.facts.units import format_duration
from isles.run.env import RankEnv
from isles.run.hang import Stall, Standing, find_stall
from isles.run.outcome import error_record
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record, write_text_atomic
from isles.run.restarts import read_last_step

_LOOK_S = 0.5
_ANSWER_S = 15.0
"""How long the ranks of this machine may take to answer; those of others, more."""

_KNOWN_STEPS = 3
_FIRST = 5
"""A script's evaluations and saves cannot be told from its steps: they get more time."""


@dataclass(slots=True)
class Signs:
    """When the script was last seen to do something, by this process' clock."""

    steps: float
    any: float
    num_steps: int = 0
    longest_s: float = 0.0
    """Between two reports of steps."""
    seen: tuple[Any, ...] = ()
    last: int | None = None


@dataclass(slots=True)
class _Question:
    """What the ranks were asked, and why."""

    number: int
    why: str
    at: float
    by_hand: bool
    seen: tuple[Any, ...]


@dataclass(slots=True)
class _Told:
    name: str
    what: str
    since: float
    seen: tuple[Any, ...] = field(default_factory=tuple)


class ScriptWatch:
    """The watch over one rank's script; that of rank 0 judges.

    Args:
        run_dir, attempt, env: this rank's place.
        config: what is too long.
        pid: the script's process.
        stacks: asks it.
        note: takes a line for the user.
    """

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        env: RankEnv,
        config: WatchdogConfig,
        pid: int,
        stacks: ScriptStacks,
        note: Callable[[str], object],
    ) -> None:
        self._run_dir, self._attempt, self._env = run_dir, attempt, env
        self._config, self._pid, self._stacks, self._note = config, pid, stacks, note
        self.error: dict[str, Any] | None = None
        """Why the script is to be ended; None while it is not."""
        now = time.monotonic()
        self._signs = Signs(now, now)
        self._answered = self._asked()
        self._question: _Question | None = None
        self._told: _Told | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The script has ended."""
        self._is_over.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            try:
                self._answer()
                if self._env.rank == 0:
                    self._look(time.monotonic())
            except OSError:  # a full disk, one that is away for a moment
                continue

    # Every rank.

    def _asked(self) -> int:
        return int((read_record(self._attempt.stalls / ASKED) or {}).get("number", 0))

    def _answer(self) -> None:
        """Put down where the script stands, where somebody has asked for it."""
        number = self._asked()
        if number == self._answered:
            return
        answer = self._stacks.ask(self._pid)
        place = {"number": number, "rank": self._env.rank, "host": os.uname().nodename}
        path = self._attempt.stalls / f"rank-{self._env.rank}.json"
        write_record(path, {**place, **answer}, durable=False)
        self._answered = number

    # Rank 0.

    def _look(self, now: float) -> None:
        self._see(now)
        if self._question is not None:
            self._gather(self._question, now)
            return
        request = self._attempt.path / "stacks"
        if request.exists():
            request.unlink()
            self._ask("somebody asked for the stacks", now, by_hand=True)
            return
        if self._told is not None:
            if self._signs.seen == self._told.seen:
                return
            self._went_on(self._told, now)
        if why := overdue(self._signs, self._config, now, self._total_steps()):
            self._ask(why, now, by_hand=False)

    def _see(self, now: float) -> None:
        """Take note of what has changed."""
        signs, step = self._signs, read_last_step(self._attempt, self._env.restart)
        if step != signs.last and step is not None:
            if signs.last is not None:
                signs.longest_s = max(signs.longest_s, now - signs.steps)
            signs.num_steps += 1
            signs.last, signs.steps = step, now
        if (seen := (step, *self._printed())) != signs.seen:
            signs.seen, signs.any = seen, now

    def _printed(self) -> list[tuple[str, int]]:
        """How much every rank has printed, as far as it is seen from here."""
        logs = sorted(self._attempt.path.glob("rank-*.log"))
        found = [(path.name, path.stat().st_size) for path in logs]
        with suppress(OSError):
            elsewhere = self._attempt.path / PRINTED
            found.append((PRINTED, elsewhere.stat().st_mtime_ns))
        return found

    def _total_steps(self) -> int | None:
        total = (read_record(self._run_dir.status) or {}).get("total_steps")
        return int(total) if isinstance(total, int) else None

    def _ask(self, why: str, now: float, *, by_hand: bool) -> None:
        self._attempt.stalls.mkdir(exist_ok=True)
        number = time.time_ns()
        write_record(self._attempt.stalls / ASKED, {"number": number}, durable=False)
        self._question = _Question(number, why, now, by_hand, self._signs.seen)

    def _gather(self, question: _Question, now: float) -> None:
        """Wait for the answers of all ranks; then say what they tell."""
        paths = {r: self._attempt.stalls / f"rank-{r}.json" for r in range(self._env.world_size)}
        found = {rank: read_record(path) or {} for rank, path in paths.items()}
        answers = {r: a for r, a in found.items() if a.get("number") == question.number}
        waited_s = now - question.at
        is_here = self._env.local_world_size == self._env.world_size
        limit_s = _ANSWER_S if is_here else _ANSWER_S + CARRIED_S
        if len(answers) < self._env.world_size and waited_s < limit_s:
            return
        self._question = None
        self._judge(question, answers, now)

    def _judge(self, question: _Question, answers: dict[int, Any], now: float) -> None:
        step = self._signs.last or 0
        hosts = [self._host(rank, answers) for rank in range(self._env.world_size)]
        stall = script_stall(answers, hosts, step)
        name = f"step-{step}" if self._signs.num_steps else self._free_name("silence")
        name = self._free_name("asked") if question.by_hand else name
        for rank, answer in answers.items():
            waits = f", waiting in {answer['waits_in']}" if answer["waits_in"] else ""
            head = f"rank {rank} on {hosts[rank]}{waits}, {answer['at'] or answer['frozen']}\n\n"
            path = self._attempt.stalls / f"{name}-rank-{rank}.txt"
            write_text_atomic(path, head + answer["stacks"], durable=False)
        text = f"{question.why}: {stall.text}"
        has_gone_on = question.seen != (self._signs.last, *self._printed())
        self._say(f"{text}; stacks of the ranks: {self._attempt.stalls}")
        if question.by_hand:
            return
        since = self._signs.any
        # What it has printed since the question may be its last word: it must not go unseen.
        seen = question.seen if has_gone_on else self._signs.seen
        self._told = _Told(name, question.why, since, seen)
        record = {"step": step, "text": text, "at": time.time(), "went_on_after_s": None}
        record |= {"culprits": list(stall.culprits)}
        write_record(self._attempt.stalls / f"{name}.json", record)
        if self._config.action == "stop":
            id = "step.stalled" if self._signs.num_steps else "script.silent"
            self.error = _error(text, stall, self._env, hosts, self._attempt, id=id)

    def _say(self, text: str) -> None:
        """To the user, and into the log, which is no sign of life of the script."""
        self._note(text)
        self._signs.seen = (self._signs.last, *self._printed())
        if self._told is not None:
            self._told.seen = self._signs.seen

    def _went_on(self, told: _Told, now: float) -> None:
        self._told, self._question = None, None
        took_s = now - told.since
        path = self._attempt.stalls / f"{told.name}.json"
        write_record(path, {**(read_record(path) or {}), "went_on_after_s": took_s})
        self._say(f"the script went on after {format_duration(took_s)}")

    def _free_name(self, kind: str) -> str:
        there = {path.name.split(".")[0] for path in self._attempt.stalls.glob(f"{kind}-*")}
        number = 1
        while any(name == f"{kind}-{number}" or f"{kind}-{number}-" in name for name in there):
            number += 1
        return f"{kind}-{number}"

    def _host(self, rank: int, answers: dict[int, Any]) -> str:
        if rank in answers:
            return str(answers[rank]["host"])
        if host := (read_record(self._attempt.rank_record(rank)) or {}).get("host"):
            return str(host)
        for node in (read_record(self._attempt.nodes) or {}).get("nodes", ()):
            first = node.get("first_rank")
            if first is not None and first <= rank < first + node["ranks"]:
                return str(node.get("host") or node.get("name"))
        return "an unknown host"


def overdue(signs: Signs, config: WatchdogConfig, now: float, total_steps: int | None) -> str:
    """Why the script is taken for stuck; empty while it is not.

    Args:
        signs: what was seen of it.
        config: what is too long.
        now: by the clock of `signs`.
        total_steps: of the whole run, where the script has told them.
    """
    silent_s = now - signs.steps
    is_last = total_steps is not None and (signs.last or 0) >= total_steps
    if signs.num_steps > _KNOWN_STEPS and not is_last:
        limit_s = max(config.min_time * _FIRST, config.slow_factor * signs.longest_s)
        if silent_s > limit_s:
            return (
                f"no step was reported for {format_duration(silent_s)} since step {signs.last} "
                f"({format_duration(signs.longest_s)} between two at most before)"
            )
    if config.max_silence is not None and now - signs.any > config.max_silence:
        return f"no rank has printed or reported anything for {format_duration(now - signs.any)}"
    return ""


def script_stall(answers: dict[int, Any], hosts: list[str], step: int) -> Stall:
    """Who holds up the others, from what the starters of the ranks have put down."""
    frozen = [rank for rank, answer in answers.items() if answer["frozen"]]
    missing = [rank for rank in range(len(hosts)) if rank not in answers]
    if frozen or missing:
        words = [f"rank {r} on {hosts[r]}: {answers[r]['frozen']}" for r in frozen]
        words += [f"rank {r} on {hosts[r]} does not answer" for r in missing]
        return Stall((*frozen, *missing), "; ".join(words[:3]))
    stands = {r: Standing(step, "running", a["at"], a["waits_in"]) for r, a in answers.items()}
    return find_stall(stands, hosts)


def _error(
    text: str, stall: Stall, env: RankEnv, hosts: list[str], attempt: Attempt, *, id: str
) -> dict[str, Any]:
    """The error record of an end by watchdog.action."""
    culprit = stall.culprits[0] if stall.culprits else env.rank
    return error_record(
        text,
        id=id,
        kind="Stalled",
        code=ExitCode.COMMUNICATION,
        where=f"rank {culprit} on {hosts[culprit]}",
        fix=f"the stacks of the ranks are in {attempt.stalls}; watchdog.action: report would wait "
        "for it",
        rank=culprit,
        host=hosts[culprit],
        is_communication=False,
        will_recur=False,
        restart=env.restart,
        is_script=True,
    )


def print_note(text: str) -> None:
    """A line in the rank's own log."""
    with suppress(OSError):
        sys.stderr.write(f"isles: {text}\n")
        sys.stderr.flush()

"""Notices that a user's own script hangs, and finds out which rank stands where.

The starter of each rank can read the stacks of its script (`ScriptStacks`). That of rank 0 also
sees whether any rank still reports steps or prints (`ScriptWatch`), and asks all for their stacks
when none has for too long, or when somebody leaves a file `stacks` in the folder of the attempt.
Questions and answers are files in `hangs/`; between hosts that share no disk the agents bring them
(`agent/hang.py`).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.agent.hang import ASKED, CARRIED_S, PRINTED
from isles.config.sections.training import WatchdogConfig
from isles.errors import ExitCode
from isles.facts.units import format_duration
from isles.run.env import RankEnv
from isles.run.hang import Frame, Hang, Position, collective_in, find_hang, place_in_words
from isles.run.outcome import error_record
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record, write_text_atomic
from isles.run.restarts import read_last_step

RUNNER = Path(__file__).with_name("main.py")

_WAIT_S = 2.0
_QUIET_S = 0.2
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+|\?\?\?) in (.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x")

_LOOK_S = 0.5
_ANSWER_S = 15.0
"""How long the ranks of this machine may take to answer; those of others, more."""

_KNOWN_STEPS = 3
_FIRST = 5
"""A script's evaluations and saves cannot be told from its steps: they get more time."""

Answer = dict[str, str]
"""at: the place in the code. waits_in: the collective operation it waits in. stacks: of all
threads. frozen: why it cannot go on by itself, or empty."""


class ScriptStacks:
    """Reads the stacks of one script, which must be started by `command`, with `fd` and `gate`."""

    def __init__(self) -> None:
        # The file that Python writes the stacks to, in memory where that can be.
        if sys.platform == "linux":
            self.fd = os.memfd_create("isles-stacks")
        else:
            with tempfile.TemporaryFile() as stream:
                self.fd = os.dup(stream.fileno())
        # The script waits until the other end has given it a byte, and ends where that is closed.
        self.gate, self._opener = os.pipe()

    def command(self, script: str, arguments: list[str]) -> list[str]:
        return [sys.executable, "-u", str(RUNNER), str(self.fd), str(self.gate), script, *arguments]

    def open_gate(self) -> None:
        """Let the script run: whatever must exist before it exists."""
        os.write(self._opener, b"\n")

    def close(self) -> None:
        for fd in (self.fd, self.gate, self._opener):
            os.close(fd)

    def ask(self, pid: int) -> Answer:
        """Where the script's process stands now. Takes up to two seconds."""
        state = ""  # the kernel's letter for what the process does
        with suppress(OSError, IndexError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            state = text.rpartition(")")[2].split()[0]
        if state in ("T", "t"):
            frozen = "it is frozen: stopped by SIGSTOP or held by a debugger"
            return {"at": "", "waits_in": "", "stacks": f"{frozen}\n", "frozen": frozen}
        text = self._dump(pid)
        stack = _main_stack(text)
        at = place_in_words(stack) if text else "where it gives no stacks"
        if state == "D":
            at += ", waiting for a disk or a driver in the kernel"
        waits_in = collective_in(stack, is_gpu=True)
        return {"at": at, "waits_in": waits_in, "stacks": text, "frozen": ""}

    def _dump(self, pid: int) -> str:
        if not self._is_ready(pid):
            return ""
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)  # its own place in the file too
        try:
            os.kill(pid, signal.SIGRTMAX - 5)
        except ProcessLookupError:
            return ""
        deadline, size, since = time.monotonic() + _WAIT_S, 0, time.monotonic()
        while time.monotonic() < deadline:
            now = os.fstat(self.fd).st_size
            if now != size:
                size, since = now, time.monotonic()
            elif size and time.monotonic() - since > _QUIET_S:
                break
            time.sleep(_QUIET_S / 4)
        return os.pread(self.fd, size, 0).decode("utf-8", errors="replace")

    def _is_ready(self, pid: int) -> bool:
        # Whether the signal would lead to stacks, in this file, and not end the process.
        with suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
            caught = next(line for line in lines.splitlines() if line.startswith("SigCgt:"))
            if not int(caught.split()[1], 16) >> (signal.SIGRTMAX - 6) & 1:
                return False
            theirs, mine = Path(f"/proc/{pid}/fd/{self.fd}").stat(), os.fstat(self.fd)
            return (theirs.st_dev, theirs.st_ino) == (mine.st_dev, mine.st_ino)
        return False


def _main_stack(text: str) -> list[Frame]:
    # The main thread's frames in the text of Python's faulthandler, the innermost last.
    stack: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stack = []  # the oldest thread comes last
        elif found := _FRAME.match(line):
            number = int(found[2]) if found[2].isdigit() else 0
            stack.append((found[1], number, found[3]))
    return [frame for frame in reversed(stack) if frame[0] != str(RUNNER)]


@dataclass(slots=True)
class Signs:
    """When the script was last seen to report a step, and to do anything, by time.monotonic()."""

    steps: float
    any: float
    num_steps: int = 0
    longest_s: float = 0.0
    """Between two reports of steps."""
    seen: tuple[Any, ...] = ()
    """The last step, and how much each rank has printed."""
    last: int | None = None


@dataclass(slots=True)
class _Question:
    """A question to all ranks for their stacks, and its reason."""

    number: int
    why: str
    at: float
    by_hand: bool
    seen: tuple[Any, ...]


@dataclass(slots=True)
class _Hang:
    """The hang that was reported last, until the script goes on."""

    name: str
    since: float
    seen: tuple[Any, ...]


class ScriptWatch:
    """Watchdog of one rank's script; that of rank 0 decides.

    Args:
        run_dir, attempt, env: this rank's place.
        config: what is too long.
        pid: the script's process.
        stacks: of the script.
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
        self._hang: _Hang | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
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
        return int((read_record(self._attempt.hangs / ASKED) or {}).get("number", 0))

    def _answer(self) -> None:
        number = self._asked()
        if number == self._answered:
            return
        answer = self._stacks.ask(self._pid)
        place = {"number": number, "rank": self._env.rank, "host": os.uname().nodename}
        path = self._attempt.hangs / f"rank-{self._env.rank}.json"
        write_record(path, {**place, **answer}, durable=False)
        self._answered = number

    # Rank 0.

    def _look(self, now: float) -> None:
        self._update_signs(now)
        if self._question is not None:
            self._gather(self._question, now)
            return
        request = self._attempt.path / "stacks"
        if request.exists():
            request.unlink()
            self._ask("somebody asked for the stacks", now, by_hand=True)
            return
        if self._hang is not None:
            if self._signs.seen == self._hang.seen:
                return
            self._went_on(self._hang, now)
        total = (read_record(self._run_dir.status) or {}).get("total_steps")
        total = int(total) if isinstance(total, int) else None
        if why := overdue(self._signs, self._config, now, total):
            self._ask(why, now, by_hand=False)

    def _update_signs(self, now: float) -> None:
        signs, step = self._signs, read_last_step(self._attempt, self._env.restart)
        if step != signs.last and step is not None:
            if signs.last is not None:
                signs.longest_s = max(signs.longest_s, now - signs.steps)
            signs.num_steps += 1
            signs.last, signs.steps = step, now
        if (seen := (step, *self._printed())) != signs.seen:
            signs.seen, signs.any = seen, now

    def _printed(self) -> list[tuple[str, int]]:
        # How much every rank has printed, as far as it is seen from here.
        logs = sorted(self._attempt.path.glob("rank-*.log"))
        found = [(path.name, path.stat().st_size) for path in logs]
        with suppress(OSError):
            elsewhere = self._attempt.path / PRINTED
            found.append((PRINTED, elsewhere.stat().st_mtime_ns))
        return found

    def _ask(self, why: str, now: float, *, by_hand: bool) -> None:
        self._attempt.hangs.mkdir(exist_ok=True)
        number = time.time_ns()
        write_record(self._attempt.hangs / ASKED, {"number": number}, durable=False)
        self._question = _Question(number, why, now, by_hand, self._signs.seen)

    def _gather(self, question: _Question, now: float) -> None:
        # Wait for the answers of all ranks, then report.
        paths = {r: self._attempt.hangs / f"rank-{r}.json" for r in range(self._env.world_size)}
        found = {rank: read_record(path) or {} for rank, path in paths.items()}
        answers = {r: a for r, a in found.items() if a.get("number") == question.number}
        is_here = self._env.local_world_size == self._env.world_size
        limit_s = _ANSWER_S if is_here else _ANSWER_S + CARRIED_S
        if len(answers) == self._env.world_size or now - question.at >= limit_s:
            self._question = None
            self._report(question, answers)

    def _report(self, question: _Question, answers: dict[int, Any]) -> None:
        attempt, step = self._attempt, self._signs.last or 0
        hosts = [self._host(rank, answers) for rank in range(self._env.world_size)]
        stall = script_hang(answers, hosts, step)
        name = f"step-{step}" if self._signs.num_steps else self._free_name("silence")
        name = self._free_name("asked") if question.by_hand else name
        for rank, answer in answers.items():
            waits = f", waiting in {answer['waits_in']}" if answer["waits_in"] else ""
            head = f"rank {rank} on {hosts[rank]}{waits}, {answer['at'] or answer['frozen']}\n\n"
            path = attempt.hangs / f"{name}-rank-{rank}.txt"
            write_text_atomic(path, head + answer["stacks"], durable=False)
        text = f"{question.why}: {stall.text}"
        has_gone_on = question.seen != (self._signs.last, *self._printed())
        self._log(f"{text}; stacks of the ranks: {attempt.hangs}")
        if question.by_hand:
            return
        # What it has printed since the question may be its last word: it must not go unseen.
        seen = question.seen if has_gone_on else self._signs.seen
        self._hang = _Hang(name, self._signs.any, seen)
        record = {"step": step, "text": text, "at": time.time(), "went_on_after_s": None}
        record |= {"root_causes": list(stall.root_causes)}
        write_record(attempt.hangs / f"{name}.json", record)
        if self._config.action == "stop":
            rank = stall.root_causes[0] if stall.root_causes else self._env.rank
            self.error = error_record(
                text,
                id="step.stalled" if self._signs.num_steps else "script.silent",
                kind="Stalled",
                code=ExitCode.COMMUNICATION,
                where=f"rank {rank} on {hosts[rank]}",
                fix=f"the stacks of the ranks are in {attempt.hangs}; watchdog.action: report "
                "would wait for it",
                rank=rank,
                host=hosts[rank],
                is_communication=False,
                will_recur=False,
                restart=self._env.restart,
                is_script=True,
            )

    def _log(self, text: str) -> None:
        # For the user, and in the rank's own log, which is no sign of life of the script.
        with suppress(OSError):
            sys.stderr.write(f"isles: {text}\n")
            sys.stderr.flush()
        self._note(text)
        self._signs.seen = (self._signs.last, *self._printed())
        if self._hang is not None:
            self._hang.seen = self._signs.seen

    def _went_on(self, hang: _Hang, now: float) -> None:
        self._hang, self._question = None, None
        took_s = now - hang.since
        path = self._attempt.hangs / f"{hang.name}.json"
        write_record(path, {**(read_record(path) or {}), "went_on_after_s": took_s})
        self._log(f"the script went on after {format_duration(took_s)}")

    def _free_name(self, kind: str) -> str:
        present = {path.name.split(".")[0] for path in self._attempt.hangs.glob(f"{kind}-*")}
        number = 1
        while any(name == f"{kind}-{number}" or f"{kind}-{number}-" in name for name in present):
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
        total_steps: of the whole run, where the script has reported them.
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


def script_hang(answers: dict[int, Any], hosts: list[str], step: int) -> Hang:
    """The ranks that the others wait for, from the answers of the starters."""
    frozen = [rank for rank, answer in answers.items() if answer["frozen"]]
    missing = [rank for rank in range(len(hosts)) if rank not in answers]
    if frozen or missing:
        words = [f"rank {r} on {hosts[r]}: {answers[r]['frozen']}" for r in frozen]
        words += [f"rank {r} on {hosts[r]} does not answer" for r in missing]
        return Hang((*frozen, *missing), "; ".join(words[:3]))
    stands = {r: Position(step, "running", a["at"], a["waits_in"]) for r, a in answers.items()}
    return find_hang(stands, hosts)

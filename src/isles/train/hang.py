"""Notices a step that takes far longer than usual, and names the rank that holds it up, and where.

The step leaves word of its stage in a `StepClock`; a thread of each rank looks at it. When a step
is overdue, all ranks post their stacks through their heartbeats, and the lowest that lives decides.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NamedTuple

from isles.config.sections.run import RunConfig
from isles.dist.world import World
from isles.errors import ExitCode
from isles.facts.units import format_duration
from isles.run.env import RankEnv
from isles.run.hang import STAGES, Frame, Hang, Position, collective_in, find_hang, place_in_words
from isles.run.outcome import end_without_agent, error_record
from isles.run.paths import Attempt
from isles.run.records import read_record, write_record, write_text_atomic
from isles.train.heartbeat import HEARTBEAT_S, Heartbeats, start_heartbeats
from isles.train.record import Recorder

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_STOPPED_S = 10.0
"""Longer than this between two looks, the process did not run: a queue had stopped it, or its
machine was paused. A machine that is full does not keep a thread waiting so long."""

_SILENT_S = 4 * HEARTBEAT_S
"""A rank without a heartbeat for so long counts as lost."""

_LISTEN_S = 6 * HEARTBEAT_S
"""How long heartbeats and stacks are collected before a rank decides."""

_RECENT_STEPS, _KNOWN_STEPS = 31, 3
_FIRST = 5
"""The first steps, and the first evaluation, may take so many times min_time."""

_COMPILING = 20
"""The same where the model is compiled."""


class Moment(NamedTuple):
    """Where a rank is.

    Args:
        phase: step, evaluating or saving; empty: nothing that is watched.
        step: its number.
        stage: the part of the step, or the phase.
        since: when the phase began, by the clock of the `StepClock`.
    """

    phase: str
    step: int
    stage: str
    since: float


class StepClock:
    """Where this rank is in its step. An update reads a clock and stores a value, nothing else.

    Args:
        now: monotonic clock, seconds; the watchdog and the heartbeats use the same.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.moment = Moment("", 0, "", now())
        self.steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Seconds that the last steps have taken."""
        self.longest_evaluation_s = 0.0

    def step(self, step: int) -> None:
        """A step begins."""
        self._leave(Moment("step", step, STAGES[0], self.now()))

    def at(self, stage: str) -> None:
        """A part of the step begins: one of `STAGES`."""
        self.moment = self.moment._replace(stage=stage)

    def begin(self, phase: str) -> None:
        """Another phase than a step begins: evaluating, saving."""
        self._leave(Moment(phase, self.moment.step, phase, self.now()))

    def end(self) -> None:
        """That phase is over."""
        self._leave(Moment("", self.moment.step, "", self.now()))

    def _leave(self, moment: Moment) -> None:
        before, self.moment = self.moment, moment
        took_s = moment.since - before.since
        if before.phase == "step":
            self.steps.append(took_s)
        elif before.phase == "evaluating":
            self.longest_evaluation_s = max(self.longest_evaluation_s, took_s)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the threads of a rank stand.

    Args:
        at: in words, such as `at my_data.py:88 read()`.
        waits_in: the collective operation in which it waits for the others; empty: none, as far as
            its stack shows.
        stacks: of all its threads, the main thread first.
    """

    at: str
    waits_in: str
    stacks: str


def place_now(main: int, *, is_gpu: bool) -> Place:
    """Where this process stands. Called from a thread that is not the main one.

    Args:
        main: the main thread's ident.
        is_gpu: whether it computes on a GPU, whose results a thread may wait for.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stack = _stack(frames.get(main))
    waits_in = collective_in(stack, is_gpu=is_gpu)
    leaf = stack
    # The innermost frame that is not Python's own waiting.
    files = (file for file, _, _ in reversed(stack) if not file.endswith("/threading.py"))
    if not waits_in and "/concurrent/futures/" in next(files, ""):
        # It waits for the thread that reads the data ahead: there is the place.
        ahead = [ident for ident, name in names.items() if name.startswith("data")]
        leaf = _stack(frames.get(ahead[0])) if ahead and ahead[0] is not None else stack
    own = threading.get_ident()
    texts = []
    for ident in [main, *(ident for ident in frames if ident not in (main, own))]:
        frame = frames.get(ident)
        lines = traceback.format_stack(frame) if frame else ["  it has no Python frame\n"]
        texts.append(f"thread {names.get(ident, ident)}:\n{''.join(lines)}")
    return Place(place_in_words(leaf), waits_in, "\n".join(texts))


def _stack(frame: FrameType | None) -> list[Frame]:
    # The frames of a thread, the innermost last.
    if frame is None:
        return []
    found = traceback.extract_stack(frame)
    return [(entry.filename, entry.lineno or 0, entry.name) for entry in found]


def _flight_record() -> str:
    # What NCCL's flight recorder knows, as JSON; empty where there is none.
    with suppress(Exception):  # a private function of torch, which may go
        from torch._C import _distributed_c10d

        dump: Any = _distributed_c10d
        text = dump._dump_nccl_trace_json(includeCollectives=True, onlyActive=True)
        return text.decode() if isinstance(text, bytes) else str(text)
    return ""


class Watchdog:
    """Watches the steps of one rank, together with the watchdogs of the others."""

    def __init__(
        self,
        config: RunConfig,
        attempt: Attempt,
        heartbeats: Heartbeats,
        recorder: Recorder,
        clock: StepClock,
        env: RankEnv,
        hosts: list[str],
        *,
        is_gpu: bool,
        saving_moved_at: Callable[[], float],
    ) -> None:
        self._saving_moved_at = saving_moved_at
        self._config = config.watchdog
        compiles = config.training.torch_compile
        self._first_s = self._config.min_time * (_COMPILING if compiles else _FIRST)
        self._save_s = config.checkpoint.timeout + self._config.min_time
        self._attempt = attempt
        self._heartbeats = heartbeats
        self._recorder = recorder
        self._clock = clock
        self._env = env
        self._hosts = hosts
        self._rank = env.rank
        self._is_gpu = is_gpu
        self._main = threading.main_thread().ident or 0
        self._listening_since: float | None = None
        self._overdue: Moment | None = None
        self._overdue_at = 0.0
        self._reported: tuple[Moment, str] | None = None
        self._answered = ""
        self._looked_at = self._resumed_at = clock.now()
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._is_over.set()
        self._heartbeats.close()

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            try:
                self._look()
            except Exception:  # a thread's edge: no bug in here may end a run
                log.exception("the watchdog has failed; the run goes on without it")
                return

    def _look(self) -> None:
        moment, now = self._clock.moment, self._clock.now()
        self._heartbeats.view = {"step": moment.step, "stage": moment.stage, "phase": moment.phase}
        self._answer()
        if self._reported is not None and self._reported[0].since != moment.since:
            self._went_on(now)
        if self._overdue is not None and self._overdue.since != moment.since:
            self._overdue = None
        if now - self._looked_at > _STOPPED_S:
            self._resumed_at = now
        self._looked_at = now
        since = max(moment.since, self._resumed_at)
        if moment.phase == "saving":  # files that move may take as long as they like
            since = max(since, self._saving_moved_at())
        limit_s, took_s = self._limit_s(moment), now - since
        is_near = limit_s is not None and took_s > limit_s - _LISTEN_S
        if is_near and self._listening_since is None:
            self._heartbeats.last_seen.clear()
            self._listening_since = now
        elif not is_near:
            self._listening_since = None
        self._heartbeats.is_reading = is_near
        if limit_s is None or took_s < limit_s:
            return
        if self._overdue is None:
            self._overdue, self._overdue_at = moment, now
            self._heartbeats.ask(f"{moment.step}-{moment.phase}")
        elif self._reported is None and now - self._overdue_at > _LISTEN_S:
            self._decide(moment, now)

    def _limit_s(self, moment: Moment) -> float | None:
        # How long this phase may take; None: as long as it likes.
        config = self._config
        match moment.phase:
            case "step" if len(self._clock.steps) < _KNOWN_STEPS:
                return self._first_s
            case "step":
                usual_s = config.slow_factor * statistics.median(self._clock.steps)
                return max(config.min_time, usual_s)
            case "evaluating":
                usual_s = config.slow_factor * self._clock.longest_evaluation_s
                return max(self._first_s, usual_s)
            case "saving":
                return self._save_s
            case _:
                return None

    def _answer(self) -> None:
        # Post where this rank stands, where a rank has asked for it.
        asked = self._heartbeats.asked
        if not asked or asked == self._answered:
            return
        self._answered = asked
        moment, place = self._clock.moment, place_now(self._main, is_gpu=self._is_gpu)
        standing = {"step": moment.step, "stage": moment.stage, **asdict(place)}
        self._heartbeats.post(json.dumps(standing))
        self._write_stacks(moment.step, self._rank, moment.stage, place)

    def _write_stacks(self, step: int, rank: int, stage: str, place: Place) -> None:
        waits = f", waiting in {place.waits_in}" if place.waits_in else ""
        head = f"rank {rank} on {self._hosts[rank]}, step {step}, {stage}{waits}, {place.at}\n\n"
        folder = self._attempt.hangs
        with suppress(OSError):  # a full disk: the log still names the rank
            folder.mkdir(exist_ok=True)
            path = folder / f"step-{step}-rank-{rank}.txt"
            write_text_atomic(path, head + place.stacks, durable=False)
            if rank == self._rank and self._is_gpu and (record := _flight_record()):
                path = folder / f"step-{step}-rank-{rank}.nccl.json"
                write_text_atomic(path, record, durable=False)

    def _decide(self, moment: Moment, now: float) -> None:
        # Name the rank that holds up the step, if no lower rank lives to do so.
        heartbeats, ranks = self._heartbeats, range(len(self._hosts))
        no_answer_s = now - heartbeats.answered_at
        if no_answer_s > _SILENT_S:
            # No rank is seen at all: it is the store that is gone.
            if heartbeats.store_rank == self._rank:
                return  # it is in this process: its own thread was held up, and no other
            lost = [heartbeats.store_rank] if heartbeats.store_rank is not None else []
            living = [rank for rank in ranks if rank not in lost]
            may_stop = not lost or living[0] == self._rank
            hang = self._without_store(no_answer_s) if may_stop else None
        else:
            seen = heartbeats.last_seen
            silent = {r: now - s.at for r, s in seen.items() if now - s.at > _SILENT_S}
            silent.pop(self._rank, None)
            unknown = [r for r in ranks if r not in seen and r != self._rank]
            living = [r for r in ranks if r not in silent and r not in unknown]
            may_stop = living[0] == self._rank
            # A lower rank in another phase has its own deadline: hours, if it hangs in a save.
            phases = {rank: last.view.get("phase") for rank, last in seen.items()}
            is_left = not any(r < self._rank and phases.get(r) == moment.phase for r in living)
            hang = self._compare(moment, living, silent, unknown) if is_left else None
        if hang is None:
            self._reported = (moment, "")
        else:
            self._report(moment, now, hang, may_stop=may_stop)

    def _without_store(self, no_answer_s: float) -> Hang:
        host, port = self._heartbeats.address
        rank = self._heartbeats.store_rank
        if rank is not None:
            return Hang(
                (rank,),
                f"rank {rank} on {self._hosts[rank]}, which keeps the store of the ranks at "
                f"{host}:{port}, has not been heard of for {no_answer_s:.0f} s: it is frozen, or "
                "its machine or network is down",
            )
        return Hang(
            (),
            f"the store of the ranks at {host}:{port} has not answered for {no_answer_s:.0f} s: "
            "the process that leads the run is frozen or gone, or its machine or network is down",
        )

    def _compare(
        self, moment: Moment, living: list[int], silent: dict[int, float], unknown: list[int]
    ) -> Hang:
        # From what the living ranks have posted.
        standings: dict[int, Position] = {}
        for rank in (*living, *silent):
            last = self._heartbeats.last_seen.get(rank)
            view = {} if last is None else last.view
            step, stage = int(view.get("step", moment.step)), str(view.get("stage", ""))
            standings[rank] = Position(step, stage, silent_s=silent.get(rank, 0.0))
            record: dict[str, Any] = json.loads(self._heartbeats.posted.get(rank, "{}"))
            # One from an earlier hang says nothing of this one.
            if rank in living and record.get("step") == step:
                place = Place(record["at"], record["waits_in"], record["stacks"])
                stage = str(record["stage"])
                standings[rank] = Position(step, stage, place.at, place.waits_in)
                if not (self._attempt.hangs / f"step-{step}-rank-{rank}.txt").exists():
                    self._write_stacks(step, rank, stage, place)  # of a rank on another host
        return find_hang(standings, self._hosts, unknown)

    def _report(self, moment: Moment, now: float, hang: Hang, *, may_stop: bool) -> None:
        what = f"step {moment.step}"
        usual = ""
        if moment.phase != "step":
            what = f"{moment.phase} after step {moment.step}"
        elif len(self._clock.steps) >= _KNOWN_STEPS:
            usual = f" (usually {_seconds(statistics.median(self._clock.steps))})"
        text = f"{what} has taken {_seconds(now - moment.since)}{usual}: {hang.text}"
        self._reported = (moment, what)
        self._recorder.note(f"{text}; stacks of the ranks: {self._attempt.hangs}")
        record = {"step": moment.step, "text": text, "at": time.time()}
        record |= {"root_causes": list(hang.root_causes), "went_on_after_s": None}
        with suppress(OSError):
            self._attempt.hangs.mkdir(exist_ok=True)
            write_record(self._attempt.hangs / f"step-{moment.step}.json", record)
        if self._config.action == "stop" and may_stop:
            self._end(text, hang)

    def _went_on(self, now: float) -> None:
        assert self._reported is not None
        moment, what = self._reported
        self._reported = None
        if not what:
            return
        took_s = now - moment.since
        self._recorder.note(f"{what} went on after {_seconds(took_s)}")
        path = self._attempt.hangs / f"step-{moment.step}.json"
        with suppress(OSError):
            write_record(path, {**(read_record(path) or {}), "went_on_after_s": took_s})

    def _end(self, text: str, hang: Hang) -> None:
        # End this rank, and with it the others, with an error that names the root cause.
        rank = hang.root_causes[0] if hang.root_causes else self._rank
        host = self._hosts[rank]
        error = error_record(
            text,
            id="step.stalled",
            kind="Stalled",
            code=ExitCode.COMMUNICATION,
            where=f"rank {rank} on {host}",
            fix=f"the stacks of the ranks are in {self._attempt.hangs}; watchdog.action: report "
            "would wait for it",
            rank=rank,
            host=host,
            is_communication=False,
            will_recur=False,
            restart=self._env.restart,
        )
        with suppress(OSError):
            write_record(self._attempt.rank_error(self._rank, self._env.restart), error)
            if self._env.attempt == 0:  # no agent looks for the root cause
                end_without_agent(self._attempt, error)
        log.error("watchdog.action is stop: %s", text)
        sys.stderr.flush()
        os._exit(ExitCode.COMMUNICATION)  # its main thread waits where no exception reaches it


@contextmanager
def watching(
    clock: StepClock,
    config: RunConfig,
    attempt: Attempt,
    env: RankEnv,
    world: World,
    recorder: Recorder,
    saving_moved_at: Callable[[], float],
) -> Iterator[Watchdog]:
    """Watch the steps within. All ranks must call this.

    Args:
        clock: where this rank is in its step.
        config: the run file.
        attempt: takes the stacks.
        env, world: this rank's place.
        recorder: takes notes for the user.
        saving_moved_at: when a save has last made progress, by `clock`.
    """
    hosts = world.gather(world.host)
    watch = Watchdog(
        config,
        attempt,
        start_heartbeats(world, env, clock.now),
        recorder,
        clock,
        env,
        hosts,
        is_gpu=world.device.type == "cuda",
        saving_moved_at=saving_moved_at,
    )
    try:
        yield watch
    finally:
        watch.close()


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)

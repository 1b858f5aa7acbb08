"""Notices a step that takes far longer than usual, and says which rank holds it up, and where.

A thread of each rank looks at the clock; the step itself only leaves word of where it is. When a
step is overdue, all ranks post their stacks over the store, and the lowest that lives judges.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from isles.config.sections.run import RunConfig
from isles.config.sections.training import WatchdogConfig
from isles.dist.world import World
from isles.errors import ExitCode
from isles.facts.units import format_duration
from isles.run.env import RankEnv
from isles.run.hang import Stall, Standing, find_stall
from isles.run.outcome import end_without_agent, error_record
from isles.run.paths import Attempt
from isles.run.records import read_record, write_record, write_text_atomic
from isles.train.hang import Frozen, Moment, Place, StepClock, flight_record, place_now
from isles.train.heartbeat import BEAT_S, Beats, open_beats
from isles.train.record import Recorder

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_SILENT_S = 4 * BEAT_S
"""A rank that has given no sign of life for so long is not heard of."""

_LISTEN_S = 6 * BEAT_S
"""How long the others are listened to, and may post their stacks, before somebody judges."""

_KNOWN_STEPS = 3
_FIRST = 5
"""The first steps, and the first evaluation, may take so many times min_time."""

_COMPILING = 20
"""The same where the model is compiled."""


class Watchdog:
    """Watches the steps of one rank, together with the watchdogs of the others."""

    def __init__(
        self,
        config: RunConfig,
        attempt: Attempt,
        beats: Beats,
        recorder: Recorder,
        clock: StepClock,
        env: RankEnv,
        hosts: list[str],
        *,
        is_gpu: bool,
        saving_moved_at: Callable[[], float],
    ) -> None:
        self._saving_moved_at = saving_moved_at
        self._config: WatchdogConfig = config.watchdog
        compiles = config.training.torch_compile
        self._first_s = self._config.min_time * (_COMPILING if compiles else _FIRST)
        self._save_s = config.checkpoint.timeout + self._config.min_time
        self._attempt = attempt
        self._beats = beats
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
        self._judged: tuple[Moment, str] | None = None
        self._answered = ""
        self._frozen = Frozen(clock.now(), clock.busy())
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Nothing is watched any more."""
        self._is_over.set()
        self._beats.close()

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            try:
                self._look()
            except Exception:  # a thread's edge: no fault in here may end a run
                log.exception("the watchdog has failed; the run goes on without it")
                return

    def _look(self) -> None:
        moment, now = self._clock.moment, self._clock.now()
        self._beats.view = {"step": moment.step, "stage": moment.stage, "phase": moment.phase}
        self._answer()
        if self._judged is not None and self._judged[0].since != moment.since:
            self._went_on(now)
        if self._overdue is not None and self._overdue.since != moment.since:
            self._overdue = None
        limit_s = self._limit_s(moment)
        self._frozen.look(now, self._clock.busy())
        took_s = now - moment.since - self._frozen.since(moment.since)
        if moment.phase == "saving":  # parts that travel may take as long as they like
            moved_at = max(moment.since, self._saving_moved_at())
            took_s = now - moved_at - self._frozen.since(moved_at)
        self._listen(limit_s is not None and took_s > limit_s - _LISTEN_S, now)
        if limit_s is None or took_s < limit_s:
            return
        if self._overdue is None:
            self._overdue, self._overdue_at = moment, now
            self._beats.ask(f"{moment.step}-{moment.phase}")
        elif self._judged is None and now - self._overdue_at > _LISTEN_S:
            self._judge(moment, now)

    def _limit_s(self, moment: Moment) -> float | None:
        """How long this phase may take; None: as long as it likes."""
        config = self._config
        match moment.phase:
            case "step" if len(self._clock.steps) < _KNOWN_STEPS:
                return self._first_s
            case "step":
                return max(
                    config.min_time, config.slow_factor * statistics.median(self._clock.steps)
                )
            case "evaluating":
                usual_s = config.slow_factor * self._clock.longest_evaluation_s
                return max(self._first_s, usual_s)
            case "saving":
                return self._save_s
            case _:
                return None

    def _listen(self, is_wanted: bool, now: float) -> None:
        if is_wanted and self._listening_since is None:
            self._beats.heard.clear()
            self._listening_since = now
        elif not is_wanted:
            self._listening_since = None
        self._beats.listening = self._listening_since is not None

    def _answer(self) -> None:
        """Post where this rank stands, where somebody has asked for it."""
        asked = self._beats.asked
        if not asked or asked == self._answered:
            return
        self._answered = asked
        moment, place = self._clock.moment, place_now(self._main, is_gpu=self._is_gpu)
        standing = {"step": moment.step, "stage": moment.stage, **place.record()}
        self._beats.post(json.dumps(standing))
        self._keep(moment.step, self._rank, moment.stage, place)

    def _keep(self, step: int, rank: int, stage: str, place: Place) -> None:
        """The stacks of a rank as a file."""
        waits = f", waiting in {place.waits_in}" if place.waits_in else ""
        head = f"rank {rank} on {self._hosts[rank]}, step {step}, {stage}{waits}, {place.at}\n\n"
        folder = self._attempt.stalls
        with suppress(OSError):  # a full disk: the log still says it
            folder.mkdir(exist_ok=True)
            path = folder / f"step-{step}-rank-{rank}.txt"
            write_text_atomic(path, head + place.stacks, durable=False)
            if rank == self._rank and self._is_gpu and (record := flight_record()):
                path = folder / f"step-{step}-rank-{rank}.nccl.json"
                write_text_atomic(path, record, durable=False)

    def _judge(self, moment: Moment, now: float) -> None:
        """Say what holds up the step, if no lower rank lives to say it."""
        beats = self._beats
        silent = {
            rank: now - heard.at
            for rank, heard in beats.heard.items()
            if now - heard.at > _SILENT_S
        }
        unknown = [rank for rank in range(len(self._hosts)) if rank not in beats.heard]
        cut_s = now - beats.talked_at
        if cut_s > _SILENT_S and beats.keeper == self._rank:
            return  # the store is in this process: its own thread was held up, and nobody else
        if cut_s > _SILENT_S:
            # Nothing is heard of anybody: it is the store that is gone.
            stall = self._without_store(cut_s)
            silent, unknown = {}, [beats.keeper] if beats.keeper is not None else []
        else:
            silent.pop(self._rank, None)
            unknown = [rank for rank in unknown if rank != self._rank]
            stall = None
        living = [r for r in range(len(self._hosts)) if r not in silent and r not in unknown]
        is_lowest = living[0] == self._rank
        lost_store = stall is not None and beats.keeper is None
        speaks = is_lowest or lost_store or (stall is None and self._speaks(moment, living))
        if not speaks:
            self._judged = (moment, "")
            return
        if stall is None:
            stall = self._compare(moment, living, silent, unknown)
        self._say(moment, now, stall, may_stop=is_lowest or lost_store)

    def _speaks(self, moment: Moment, living: list[int]) -> bool:
        """Whether no lower rank will judge: one that hangs in a save has hours to go."""
        views = {rank: heard.view for rank, heard in self._beats.heard.items()}
        return not any(
            rank < self._rank and views.get(rank, {}).get("phase") == moment.phase
            for rank in living
        )

    def _without_store(self, cut_s: float) -> Stall:
        host, port = self._beats.address
        keeper = self._beats.keeper
        if keeper is not None:
            return Stall(
                (keeper,),
                f"rank {keeper} on {self._hosts[keeper]}, which keeps the store of the ranks at "
                f"{host}:{port}, has not been heard of for {cut_s:.0f} s: it is frozen, or its "
                "machine or network is down",
            )
        return Stall(
            (),
            f"the store of the ranks at {host}:{port} has not answered for {cut_s:.0f} s: the "
            "process that leads the run is frozen or gone, or its machine or network is down",
        )

    def _compare(
        self, moment: Moment, living: list[int], silent: dict[int, float], unknown: list[int]
    ) -> Stall:
        """The decision, from what the living ranks have posted."""
        standings: dict[int, Standing] = {}
        for rank in (*living, *silent):
            view = self._beats.heard[rank].view if rank in self._beats.heard else {}
            step, stage = int(view.get("step", moment.step)), str(view.get("stage", ""))
            standings[rank] = Standing(step, stage, silent_s=silent.get(rank, 0.0))
            record: dict[str, Any] = json.loads(self._beats.posted.get(rank, "{}"))
            # One from an earlier stall says nothing of this one.
            if rank in living and record.get("step") == step:
                place = Place(record["at"], record["waits_in"], record["stacks"])
                stage = str(record["stage"])
                standings[rank] = Standing(step, stage, place.at, place.waits_in)
                if not (self._attempt.stalls / f"step-{step}-rank-{rank}.txt").exists():
                    self._keep(step, rank, stage, place)  # of a rank on another host
        return find_stall(standings, self._hosts, unknown)

    def _say(self, moment: Moment, now: float, stall: Stall, *, may_stop: bool) -> None:
        what = f"step {moment.step}" if moment.phase == "step" else f"{moment.phase} after step "
        what += "" if moment.phase == "step" else str(moment.step)
        usual = ""
        if moment.phase == "step" and len(self._clock.steps) >= _KNOWN_STEPS:
            usual = f" (usually {_seconds(statistics.median(self._clock.steps))})"
        text = f"{what} has taken {_seconds(now - moment.since)}{usual}: {stall.text}"
        self._judged = (moment, what)
        self._recorder.note(f"{text}; stacks of the ranks: {self._attempt.stalls}")
        record = {"step": moment.step, "text": text, "at": time.time()}
        record |= {"culprits": list(stall.culprits), "went_on_after_s": None}
        with suppress(OSError):
            self._attempt.stalls.mkdir(exist_ok=True)
            write_record(self._attempt.stalls / f"step-{moment.step}.json", record)
        if self._config.action == "stop" and may_stop:
            self._end(text, stall)

    def _went_on(self, now: float) -> None:
        assert self._judged is not None
        moment, what = self._judged
        self._judged = None
        if not what:
            return
        took_s = now - moment.since
        self._recorder.note(f"{what} went on after {_seconds(took_s)}")
        path = self._attempt.stalls / f"step-{moment.step}.json"
        with suppress(OSError):
            write_record(path, {**(read_record(path) or {}), "went_on_after_s": took_s})

    def _end(self, text: str, stall: Stall) -> None:
        """End this rank, and with it the others, with an error that names the culprit."""
        culprit = stall.culprits[0] if stall.culprits else self._rank
        host = self._hosts[culprit]
        error = error_record(
            text,
            id="step.stalled",
            kind="Stalled",
            code=ExitCode.COMMUNICATION,
            where=f"rank {culprit} on {host}",
            fix=f"the stacks of the ranks are in {self._attempt.stalls}; watchdog.action: report "
            "would wait for it",
            rank=culprit,
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
    """Meanwhile the steps are watched. All ranks must call this.

    Args:
        clock: where this rank is in its step.
        config: the run file.
        attempt: where stacks are kept.
        env, world: this rank's place.
        recorder: tells the user.
        saving_moved_at: when a save has last come further, by `clock`.
    """
    hosts = world.gather(world.host)
    watch = Watchdog(
        config,
        attempt,
        open_beats(world, env, clock.now),
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

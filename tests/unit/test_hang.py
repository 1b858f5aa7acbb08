"""Who holds up a step: who is behind, who judges an overdue step, and what is no hang at all.

The clock and the store are passed in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from isles.run.env import RankEnv
from isles.run.hang import RankPosition, find_hang
from isles.run.live import ask_for_stacks
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.train.clock import StepClock
from isles.train.hang import Watchdog
from isles.train.record import Recorder
from tests.each import each
from tests.run_files import load

LOADS = RankPosition(7, "data loading", "at my.py:88 read()")
SPINS = RankPosition(7, "forward and backward", "at my.py:3 spin()")
WAITS = RankPosition(7, "forward and backward", "at x.py:1 f()", "the backward pass")
AHEAD = RankPosition(8, "agreeing", "at loop.py:1 train()", "self._work.wait()")
"""On GPUs others may be a step ahead, and wait there."""


@each(
    ([WAITS, LOADS, None, WAITS], (2,), "no heartbeat from rank 2 on b for 10 s: it is"),
    ([WAITS, WAITS, WAITS, LOADS], (3,), "rank 3 on b is behind: in data loading, at my.py:88"),
    ([AHEAD, WAITS, AHEAD, AHEAD], (1,), "rank 1 on a is behind: in forward and backward"),
    ([WAITS, WAITS, SPINS, WAITS], (2,), "rank 2 on b is behind: in forward and backward"),
    ([WAITS, WAITS, WAITS, WAITS], (), "all ranks wait for each other in the backward pass"),
    ([SPINS, SPINS, SPINS, SPINS], (), "all ranks are busy; rank 0 on a is in forward"),
    ([SPINS], (0,), "it is in forward and backward, at my.py:3 spin()"),
    ([*[None] * 5, WAITS], (0, 1, 2, 3, 4), "; and 2 more"),
)
def test_the_rank_that_the_others_wait_for_is_named(ranks, root_causes, text):
    answers = {rank: position for rank, position in enumerate(ranks) if position is not None}
    hang = find_hang(answers, ["a", "a", "b", "b", "b", "b"][: len(ranks)], silent_s=9.6)
    assert hang.root_causes == root_causes and text in hang.text


def test_the_clock_keeps_steps_and_evaluations_apart() -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    clock = StepClock(lambda: next(now))
    clock.step(1)
    clock.step(2)
    clock.begin("evaluating")
    clock.end()
    clock.step(3)  # the time between two steps is not a step
    assert list(clock.steps) == [2.0, 3.0]
    assert clock.longest_evaluation_s == 4.0


RUN = "model: {name_or_path: gpt2}\ndata: {sources: [{path: a}]}\ntraining: {max_steps: 20}\n"
NOW = 5_000.0
"""By the clock that is passed in; the machine's own may be anything."""


class Rank:
    """The watchdog of one of two ranks, long in a phase at NOW, which looks when it is told to."""

    def __init__(
        self, folder: Path, phase: str, rank: int = 0, took_s: float = 2_000.0, moved_at: float = 0
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.rank, self.store = folder, rank, HashStore()
        self.is_cut = False
        self._now = NOW - took_s
        self.clock = clock = StepClock(lambda: self._now)
        clock.steps.extend([1.0] * 3)
        clock.step(7)
        if phase != "step":
            clock.begin(phase)
        config = load(folder, RUN, "checkpoint.timeout=100s").config
        run = (config, Attempt(folder, 1), RankEnv(rank, rank, 2, 2, 1, None))
        recorder = Recorder(RunDir(folder), is_main=False, world_size=2)
        given = (*run, ["box", "other"], clock, self._connect, recorder)
        self._watchdog = Watchdog(*given, is_gpu=False, saving_moved_at=lambda: moved_at)

    def _connect(self) -> HashStore:
        if self.is_cut:
            raise RuntimeError("cut off")
        return self.store

    def look(self, now: float) -> None:
        """One look at that moment, after it has looked all the time."""
        self._now = self._watchdog._looked_at = now
        self._watchdog.look()

    def view(self, now: float) -> None:
        """The same, and then it sees to what a watcher wants to see."""
        self.look(now)
        self._watchdog._view()

    def hear(self, phase: str) -> None:
        """The other rank answers, from a phase of step 7."""
        answer = {"question": 1, "phase": phase, "step": 7, "stage": phase, "since": 0.0}
        answer |= {"at": "at x.py:1 f()", "waits_in": "", "stacks": ""}
        self.store.set(f"rank-{1 - self.rank}", json.dumps(answer))

    def found(self) -> dict[str, Any] | None:
        """What it has reported."""
        return read_record(self.folder / "hangs" / "step-7.json")

    def judge(self) -> dict[str, Any] | None:
        """What it reports when it has looked, listened, and looked again."""
        self.look(NOW)
        self.look(NOW + 7.0)
        return self.found()


@each(("saving", True), ("step", False))
def test_a_rank_that_hangs_in_a_save_is_named_by_those_that_wait(phase, judges, *, tmp_path):
    """It has the long deadline of a save itself; in the same phase the lowest rank judges."""
    rank = Rank(tmp_path, "step", rank=1)
    rank.hear(phase)
    assert (rank.judge() is not None) == judges


@each(
    ("step", 40.0, 0.0, False),
    ("step", 200.0, 0.0, True),
    ("evaluating", 200.0, 0.0, False),
    ("evaluating", 400.0, 0.0, True),
    ("saving", 2_000.0, NOW - 5.0, False),
    ("saving", 2_000.0, 0.0, True),
)
def test_how_long_a_phase_may_take(phase, took_s, moved_at, is_hang, *, tmp_path):
    """A step: min_time, a minute here; an evaluation: five times that; a save: while it moves."""
    found = Rank(tmp_path, phase, took_s=took_s, moved_at=moved_at).judge()
    assert (found is not None) == is_hang


@each((200.0, False), (400.0, True))
def test_a_step_with_other_rows_may_take_as_long_as_a_first_one(took_s, is_hang, *, tmp_path):
    """A compiled model is compiled once more then."""
    rank = Rank(tmp_path, "step", took_s=took_s)
    rank.clock.forget()
    assert (rank.judge() is not None) == is_hang


def test_time_in_which_a_process_did_not_run_is_no_hang(tmp_path: Path) -> None:
    """A queue had stopped it, or its machine was paused: the phase is timed anew from there."""
    rank = Rank(tmp_path, "step", took_s=20.0)
    rank._now = NOW + 900.0
    rank._watchdog.look()
    for later_s, is_hang in ((950.0, False), (970.0, False), (977.0, True)):
        rank.look(NOW + later_s)
        assert (rank.found() is not None) == is_hang


def test_a_store_that_is_away_is_asked_again_and_then_named(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "step")
    rank.is_cut = True
    rank.look(NOW)
    rank.is_cut = False
    rank.look(NOW + 5.0)
    rank.look(NOW + 7.0)
    assert rank.found() is None, "who was asked late may answer late"
    rank.look(NOW + 12.0)
    assert rank.found() is not None
    lost = Rank(tmp_path / "lost", "step")
    lost.is_cut = True
    assert "the ranks' store has not answered" in (lost.judge() or {})["text"]


def test_who_asks_for_stacks_gets_them_and_nothing_else_happens(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "step", took_s=1.0)
    attempt = Attempt(tmp_path, 1)
    rank.view(NOW)
    assert not rank.store.check(["asked"])
    asked = ask_for_stacks(attempt)
    rank.view(NOW)
    rank.view(NOW + 1.0)
    assert read_record(attempt.stacks) is None, "the other has not answered"
    rank.hear("step")
    rank.view(NOW + 1.0)
    answer = read_record(attempt.stacks) or {}
    assert answer["asked_at"] == asked and list(answer["ranks"]) == ["0", "1"]
    own = answer["ranks"]["0"]
    assert (own["host"], own["step"], own["stage"]) == ("box", 7, "asking")
    assert "test_who_asks_for_stacks" in own["stacks"]
    rank.view(NOW + 2.0)
    assert int(rank.store.get("asked")) == 1, "one answer for each request"
    assert not attempt.hangs.exists()
    again = ask_for_stacks(attempt)
    rank.view(NOW + 2.0)
    rank.view(NOW + 9.0)
    answer = read_record(attempt.stacks) or {}
    assert answer["asked_at"] == again
    assert list(answer["ranks"]) == ["0"], "who is silent is left out"

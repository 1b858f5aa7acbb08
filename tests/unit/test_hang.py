"""Who holds up a step: who is behind, who judges an overdue step, and what is no hang at all.

The clock and the store are passed in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from isles.config.load import load_run_file
from isles.run.env import RankEnv
from isles.run.hang import Position, find_hang
from isles.run.live import ask_for_stacks
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.train.clock import StepClock
from isles.train.hang import Watchdog
from isles.train.record import Recorder
from tests.each import each

LOADS = Position(7, "data loading", "at my.py:88 read()")
SPINS = Position(7, "forward and backward", "at my.py:3 spin()")
WAITS = Position(7, "forward and backward", "at x.py:1 f()", "the backward pass")
AHEAD = Position(8, "agreeing", "at loop.py:1 train()", "self._work.wait()")
"""On GPUs others may be a step ahead, and wait there."""


@each(
    ("ranks", "root_causes", "text"),
    [
        ([WAITS, LOADS, None, WAITS], (2,), "rank 2 on b has not been heard of for 10 s: it is"),
        ([WAITS, WAITS, WAITS, LOADS], (3,), "rank 3 on b is behind: in data loading, at my.py:88"),
        ([AHEAD, WAITS, AHEAD, AHEAD], (1,), "rank 1 on a is behind: in forward and backward"),
        ([WAITS, WAITS, SPINS, WAITS], (2,), "rank 2 on b is behind: in forward and backward"),
        ([WAITS, WAITS, WAITS, WAITS], (), "all ranks wait for one another, in the backward pass"),
        ([SPINS, SPINS, SPINS, SPINS], (), "all ranks are busy; rank 0 on a is in forward"),
        ([SPINS], (0,), "it is in forward and backward, at my.py:3 spin()"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(
    ranks: list[Position | None], root_causes: tuple[int, ...], text: str
) -> None:
    answers = {rank: position for rank, position in enumerate(ranks) if position is not None}
    hang = find_hang(answers, ["a", "a", "b", "b"][: len(ranks)], silent_s=9.6)
    assert hang.root_causes == root_causes
    assert hang.text.startswith(text)


def test_many_culprits_are_cut_short() -> None:
    hang = find_hang({5: WAITS}, ["h"] * 6, silent_s=5.0)
    assert hang.root_causes == (0, 1, 2, 3, 4)
    assert hang.text.endswith("; and 2 more")


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


RUN = """\
name: a
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 32}
checkpoint: {timeout: 100s}
"""
NOW = 5_000.0
"""By the clock that is passed in; the machine's own may be anything."""


class Rank:
    """The watchdog of one of two ranks, long in a phase at NOW, which looks when it is told to."""

    def __init__(
        self,
        folder: Path,
        phase: str,
        rank: int = 0,
        took_s: float = 2_000.0,
        moved_at: float = 0.0,
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text(RUN)
        self.folder, self.rank, self.store = folder, rank, HashStore()
        self.is_cut = False
        self._now = NOW - took_s
        clock = StepClock(lambda: self._now)
        clock.steps.extend([1.0] * 3)
        clock.step(7)
        if phase != "step":
            clock.begin(phase)
        self._watchdog = Watchdog(
            load_run_file(folder / "run.yaml", ()).config,
            Attempt(folder, 1),
            RankEnv(rank, rank, 2, 2, 1, None),
            ["box", "other"],
            clock,
            self._connect,
            Recorder(RunDir(folder), is_main=False, world_size=2),
            is_gpu=False,
            saving_moved_at=lambda: moved_at,
        )

    def _connect(self) -> HashStore:
        if self.is_cut:
            raise RuntimeError("cut off")
        return self.store

    def look(self, now: float) -> None:
        """One look at that moment, after it has looked all the time."""
        self._now = self._watchdog._looked_at = now
        self._watchdog.look()

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


@each(("phase", "judges"), [("saving", True), ("step", False)])
def test_a_rank_that_hangs_in_a_save_is_named_by_those_that_wait(
    tmp_path: Path, phase: str, judges: bool
) -> None:
    """It has the long deadline of a save itself; in the same phase the lowest rank judges."""
    rank = Rank(tmp_path, "step", rank=1)
    rank.hear(phase)
    assert (rank.judge() is not None) == judges


def test_a_rank_without_an_answer_is_named(tmp_path: Path) -> None:
    found = Rank(tmp_path, "step").judge()
    assert found is not None
    assert found["root_causes"] == [1]
    assert "rank 1 on other has not been heard of for 7 s" in found["text"]
    assert "step 7, asking" in (tmp_path / "hangs" / "step-7-rank-0.txt").read_text()


def test_an_evaluation_may_take_five_times_as_long_as_a_step(tmp_path: Path) -> None:
    """Of min_time, which is a minute here."""
    found = {
        (phase, took_s): Rank(tmp_path / f"{phase}-{took_s}", phase, took_s=took_s).judge()
        for phase in ("step", "evaluating")
        for took_s in (40.0, 200.0, 400.0)
    }
    hangs = [case for case, record in found.items() if record is not None]
    assert hangs == [("step", 200.0), ("step", 400.0), ("evaluating", 400.0)]


def test_a_save_whose_parts_move_is_no_hang(tmp_path: Path) -> None:
    assert Rank(tmp_path, "saving", moved_at=NOW - 5.0).judge() is None
    assert Rank(tmp_path / "still", "saving").judge() is not None


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
    assert "the store of the ranks has not answered" in (lost.judge() or {})["text"]


def test_who_asks_for_stacks_gets_them_and_nothing_else_happens(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "step", took_s=1.0)
    attempt = Attempt(tmp_path, 1)
    rank.look(NOW)
    rank._watchdog._view()
    assert not rank.store.check(["asked"])
    asked = ask_for_stacks(attempt)
    rank._watchdog._view()
    rank.look(NOW + 1.0)
    rank._watchdog._view()
    assert read_record(attempt.stacks) is None, "the other has not answered"
    rank.hear("step")
    rank._watchdog._view()
    answer = read_record(attempt.stacks) or {}
    assert answer["asked_at"] == asked and list(answer["ranks"]) == ["0", "1"]
    own = answer["ranks"]["0"]
    assert (own["host"], own["step"], own["stage"]) == ("box", 7, "asking")
    assert "test_who_asks_for_stacks" in own["stacks"]
    rank.look(NOW + 2.0)
    rank._watchdog._view()
    assert int(rank.store.get("asked")) == 1, "one answer for each request"
    assert not attempt.hangs.exists()
    again = ask_for_stacks(attempt)
    rank._watchdog._view()
    rank.look(NOW + 9.0)
    rank._watchdog._view()
    answer = read_record(attempt.stacks) or {}
    assert answer["asked_at"] == again and list(answer["ranks"]) == ["0"], (
        "who is silent is left out"
    )

"""Who judges an overdue step, and what is no stall at all: the clock is passed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.config.load import load_run_file
from isles.run.env import RankEnv
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.train.hang import StepClock, Watchdog
from isles.train.heartbeat import Heartbeats, LastSeen
from isles.train.record import Recorder

RUN = """\
name: a
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 32}
checkpoint: {timeout: 100s}
"""
NOW = 5_000.0
"""By the clock that is passed in; the machine's own may be anything."""


class CutOff:
    """A store that is cut off when it is first told what somebody asks for."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.is_cut = True

    def set(self, name: str, text: str) -> None:
        if name == "ask" and self.is_cut:
            self.is_cut = False
            raise ConnectionError("cut off")
        self.kept[name] = text

    def check(self, names: list[str]) -> bool:
        return all(name in self.kept for name in names)

    def get(self, name: str) -> bytes:
        return self.kept[name].encode()


def quiet_heartbeats(rank: int, store_rank: int | None = None) -> Heartbeats:
    """Heartbeats that are sent to nobody."""
    heartbeats = Heartbeats(
        ("127.0.0.1", 9), "token", rank=rank, world_size=2, store_rank=store_rank, now=lambda: NOW
    )
    heartbeats.close()
    return heartbeats


def overdue(
    tmp_path: Path,
    heartbeats: Heartbeats,
    phase: str,
    moved_at: float = 0.0,
    took_s: float = 2_000.0,
) -> Watchdog:
    """The watchdog of a rank that has been in a phase since long before NOW."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "run.yaml").write_text(RUN)
    clock = StepClock(lambda: NOW - took_s)
    clock.steps.extend([1.0] * 3)
    clock.step(7)
    if phase != "step":
        clock.begin(phase)
    watch = Watchdog(
        load_run_file(tmp_path / "run.yaml", ()).config,
        Attempt(tmp_path, 1),
        heartbeats,
        Recorder(RunDir(tmp_path), is_main=False, world_size=2),
        clock,
        RankEnv(heartbeats._rank, 0, 2, 1, 1, None),
        ["box", "other"],
        is_gpu=False,
        saving_moved_at=lambda: moved_at,
    )
    watch.close()
    return watch


def look(watch: Watchdog, now_s: float) -> None:
    """One look at that moment, half a second after the one before."""
    watch._looked_at = now_s - 0.5
    watch._clock.now = lambda: now_s
    watch._look()


def judge(watch: Watchdog) -> dict[str, Any] | None:
    """What it says when it has looked, listened, and looked again."""
    look(watch, NOW - 10.0)
    watch._heartbeats.last_seen = {r: h for r, h in LAST_SEEN.items() if r != watch._rank}
    look(watch, NOW)
    return read_record(watch._attempt.hangs / "step-7.json")


LAST_SEEN: dict[int, LastSeen] = {}


@pytest.mark.parametrize(("phase", "judges"), [("saving", True), ("step", False)])
def test_a_rank_that_hangs_in_a_save_is_named_by_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, judges: bool
) -> None:
    """It has the long deadline of a save itself; in the same phase the lowest rank judges."""
    view = {"step": 7, "stage": phase if judges else "agreeing", "phase": phase, "number": 1}
    monkeypatch.setitem(LAST_SEEN, 0, LastSeen(view, NOW))
    found = judge(overdue(tmp_path, quiet_heartbeats(1), "step"))
    assert (found is not None) == judges


def test_an_evaluation_may_take_five_times_as_long_as_a_step(tmp_path: Path) -> None:
    """Of min_time, which is a minute here."""
    found = {
        (phase, took_s): judge(
            overdue(tmp_path / f"{phase}-{took_s}", quiet_heartbeats(0), phase, took_s=took_s)
        )
        for phase in ("step", "evaluating")
        for took_s in (40.0, 200.0, 400.0)
    }
    hangs = [case for case, record in found.items() if record is not None]
    assert hangs == [("step", 200.0), ("step", 400.0), ("evaluating", 400.0)]


def test_a_save_whose_parts_move_is_no_stall(tmp_path: Path) -> None:
    assert judge(overdue(tmp_path, quiet_heartbeats(0), "saving", moved_at=NOW - 5.0)) is None
    assert judge(overdue(tmp_path / "still", quiet_heartbeats(0), "saving")) is not None


def test_time_in_which_a_process_did_not_run_is_no_hang(tmp_path: Path) -> None:
    """A queue had stopped it, or its machine was paused: the phase is timed anew from there."""
    watch = overdue(tmp_path, quiet_heartbeats(0), "step", took_s=20.0)
    watch._clock.now = lambda: NOW + 900.0
    watch._look()
    assert watch._overdue is None
    look(watch, NOW + 950.0)
    assert watch._overdue is None
    look(watch, NOW + 970.0)
    assert watch._overdue is not None


def test_who_keeps_the_store_does_not_miss_itself(tmp_path: Path) -> None:
    heartbeats = quiet_heartbeats(0, store_rank=0)
    heartbeats.answered_at = NOW - 30.0
    watch = overdue(tmp_path, heartbeats, "step")
    assert judge(watch) is None
    heartbeats.answered_at = NOW
    look(watch, NOW)
    assert (read_record(tmp_path / "hangs" / "step-7.json") or {})["root_causes"] == [1]


def test_what_a_store_was_not_told_it_is_told_again() -> None:
    store: Any = CutOff()
    heartbeats = quiet_heartbeats(0)
    heartbeats.ask("7-step")
    with pytest.raises(ConnectionError):
        heartbeats._exchange(store)
    heartbeats._exchange(store)
    assert heartbeats.asked == "7-step"
    assert heartbeats.answered_at == NOW

"""When a cluster contributes, what it asks for, what it makes of what it hears, what it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isles.config.sections.outer import DiLoCoConfig
from isles.errors import CommunicationError, ConfigError, UserError
from isles.outer.client.client import SingleCluster
from isles.outer.client.spool import Spool
from isles.outer.codec import parse_codec
from isles.outer.layout import make_layout
from isles.outer.messages import (
    Adopt,
    Apply,
    Contribute,
    Delay,
    End,
    Lease,
    RoundAnswer,
    UseReserve,
)
from isles.outer.trainer.outer import Outer
from isles.outer.trainer.step import Clock
from isles.outer.trainer.sync import LEAST, MOST, OuterScheduler, auto_delay
from isles.run.paths import RunDir
from isles.train.record import Recorder

BATCH = 4
LAYOUT = make_layout({"a": (8,), "b": (8,)}, parse_codec("none"), num_fragments=2)


def at(step: int = 0, **more: Any) -> Any:
    """What is read of an `OuterStep` after so many inner steps, all of them of this cluster."""
    known = {"num_fragments": 2, "version": 0, "contributed_at": 0, "sent": (), "has_learned": True}
    state = SimpleNamespace(steps=step, step=step, **{**known, "samples_left": 10**6, **more})
    state.progress = state
    return state


class Rank0:
    """A scheduler, and the line on which a test speaks to it."""

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.monotonic, **settings: Any
    ) -> None:
        spool = Spool(folder / "spool", version=0, kept=0, since=0, most_bytes=0)
        spool.folder.mkdir(exist_ok=True)
        self.line = SingleCluster(LAYOUT, "a", spool, next_sample=0)
        self.line.poll()
        state = at(config=DiLoCoConfig(**{"sync_every": 8, "fragments": 2, **settings}))
        recorder = Recorder(RunDir(folder), is_main=False, world_size=1)
        self.scheduler = OuterScheduler(
            state, self.line, batch=BATCH, total_steps=100, recorder=recorder, clock=clock
        )

    def plan(self, state: Any) -> list[Any]:
        self.scheduler.exchange = state
        self.scheduler.plan()
        return self.scheduler.take_commands()

    def due_steps(self, last: int) -> list[int]:
        """The inner steps after which it contributes, where every average comes at once."""
        due, version = [], 0
        for step in range(1, last + 1):
            contributed_at = due[-1] if due else 0
            if self.plan(at(step - 1, version=version, contributed_at=contributed_at)):
                assert self.scheduler.step_of(version) == step
                due.append(step)
                version += 1
        return due


def committed(outer_step: int, **fields: Any) -> Apply:
    known = {"weights": {"a": 1}, "refused": {}, "size_bytes": 8}
    return Apply(outer_step=outer_step, path=Path("x"), **{**known, **fields})


def test_a_turn_is_due_every_so_many_steps(tmp_path):
    assert Rank0(tmp_path).due_steps(20) == [4, 8, 12, 16, 20]
    warm = Rank0(tmp_path, warmup_rounds=2, warmup_sync_every=3)
    assert warm.due_steps(22) == [1, 3, 4, 6, 10, 14, 18, 22]
    assert [warm.scheduler.sync_every_at(outer_step) for outer_step in (0, 3, 4)] == [3, 3, 8]


def test_whether_a_cluster_contributes(tmp_path):
    for why, state, heard, number in (
        ("its other fragment is under way", at(7, sent=(0,), contributed_at=4), {}, 1),
        ("both are", at(90, sent=(0, 1), contributed_at=8), {}, None),
        ("the first is back", at(90, version=1, sent=(1,), contributed_at=8), {}, 2),
        ("missed turns are not made up for", at(41, version=1, contributed_at=40), {}, None),
        ("but the next one is made", at(43, version=1, contributed_at=40), {}, 1),
        ("a turn that closes gets what there is", at(1), {"closing": (0, 3.0)}, 0),
        ("or nothing", at(0, has_learned=False), {"closing": (0, 3.0)}, None),
        ("another closes", at(2, version=1, contributed_at=2), {"closing": (0, 3.0)}, None),
        ("it must take the state first", at(3), {"is_behind": True}, None),
        ("decided before it came", at(11), {"decided": 2, "closing": (1, 1.0)}, None),
        ("so is the next", at(11, version=1), {"decided": 2, "closing": (1, 1.0)}, None),
        ("the first that is not", at(11, version=2), {"decided": 2}, 2),
        ("nor is this", at(11, version=1, sent=(1,)), {"decided": 2}, 2),
    ):
        rank0 = Rank0(tmp_path)
        rank0.line.state = replace(rank0.line.state, **heard)
        assert rank0.plan(state) == ([] if number is None else [Contribute(number)]), why


def test_an_average_takes_the_step_to_that_of_the_others_and_a_state_its_place(tmp_path):
    rank0 = Rank0(tmp_path)
    rank0.line.emit(committed(0)), rank0.line.emit(committed(1))
    # And no contribution before they are taken in.
    assert rank0.plan(at(3)) == [committed(0, step=4), committed(1, step=8)]
    rank0.line.emit(committed(99))
    assert rank0.plan(at(3)) == [committed(99, step=100)], "never beyond the end"
    rank0.line.state.is_behind = True
    state = Adopt(version=5, paths=(), outer_params=(), source="b")
    rank0.line.emit(committed(0)), rank0.line.emit(state)
    assert rank0.plan(at(3)) == [replace(state, step=20)]
    assert rank0.plan(at(3)) == []


def test_samples_are_claimed_ahead_and_no_more_than_are_needed(tmp_path):
    rank0 = Rank0(tmp_path)
    for _ in range(3):
        rank0.scheduler.exchange = at(samples_left=0)
        rank0.scheduler.plan()
    assert rank0.scheduler.take_commands() == [Lease(((0, 8 * BATCH),))], "asked for once"
    few = at(samples_left=8 * BATCH - 1)
    assert rank0.plan(few) == []  # it is asked for now, and heard of in the next step
    assert rank0.plan(few) == [Lease(((8 * BATCH, 16 * BATCH),))]
    rank0.plan(at(97, contributed_at=97, samples_left=3 * BATCH))
    assert rank0.line.poll() == [], "three steps are left"
    rank0.plan(at(samples_left=0))
    rank0.scheduler.restock(is_late=True)
    assert isinstance(rank0.scheduler.take_commands()[-1], UseReserve)


def test_who_is_not_let_in_hears_why(tmp_path):
    now = 100.0
    rank0 = Rank0(tmp_path, lambda: now, deadline=5.0)
    scheduler, state = rank0.scheduler, rank0.line.state
    state.is_joined = False
    state.lost_at, state.why = now, "hub:1 does not answer"
    now += 4.0
    assert scheduler.failure(is_new=True) is None
    now += 2.0
    late = scheduler.failure(is_new=True)
    assert "did not answer within 5s: hub:1 does not answer" in str(late)
    assert isinstance(late, CommunicationError) and "outer.deadline" in str(late)
    assert scheduler.failure(is_new=False) is None, "it goes on alone"
    state.refusal = UserError("wrong token", where="hub:1", fix="paste it again")
    failure = scheduler.failure(is_new=False)
    assert isinstance(failure, ConfigError) and failure.where == "hub:1"


def end_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[..., float]) -> str:
    """How a cluster ends that has nothing left, as its last note says; "": with all.

    Args:
        look: of each look at the hub the number and rank 0's line; returns the seconds it takes.
    """
    rank0 = Rank0(folder, deadline=5.0)
    state = rank0.scheduler.exchange
    state.version, state.has_learned, state.last_row = 1, False, None
    state.clock, state.finish_move = Clock(), lambda: None
    state.apply = lambda apply: setattr(state, "version", apply.outer_step + 1)
    rank0.line.state.members = ("a", "b")
    now, looks, notes = 1000.0, 0, []

    def wait(timeout_s: float) -> None:
        nonlocal now, looks
        looks += 1
        assert looks < 1000, "it looks for ever"
        now += look(looks, rank0.line) or timeout_s

    rank0.line.wait, rank0.line.report = wait, lambda **progress: None
    for module in ("trainer.outer", "client.meeting"):
        clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
        monkeypatch.setattr(f"isles.outer.{module}.time", clock)
    world = SimpleNamespace(broadcast=lambda value: value, gather=lambda value: [value])
    recorder = Recorder(RunDir(folder), is_main=False, world_size=1)
    recorder.note = notes.append
    outer = Outer(
        state,
        rank0.scheduler,
        world=world,
        batch=BATCH,
        forget_ahead=lambda: None,
        meter=SimpleNamespace(pause=lambda phase: 0.0, resume=lambda paused: None),
        recorder=recorder,
        total_steps=100,
        requested=lambda: 0,
    )
    assert outer.finish() == 0
    assert state.version == 2 or notes
    return "".join(notes)


def test_who_was_stopped_at_the_end_still_takes_what_the_others_have_averaged(
    tmp_path, monkeypatch
):
    def stopped(look: int, line: Any) -> float:
        if look == 5:  # the last within the deadline
            line.state.lost_at, line.state.is_connected = 1500.0, False
        if look == 8:
            line.state.lost_at, line.state.is_connected = None, True
            line.emit(committed(1))
            line.emit(End(2))
        return 500.0 if look == 5 else 1.0

    assert end_alone(tmp_path, monkeypatch, stopped) == ""

    def away(look: int, line: Any) -> float:
        if look == 2:
            line.state.lost_at, line.state.is_connected = 1001.0, False
        return 1.0

    assert "not ended after 10s (the others are not reachable)" in end_alone(
        tmp_path, monkeypatch, away
    )

    def refused(look: int, line: Any) -> float:
        line.state.refusal = UserError("another run", where="hub:1", fix="start anew")
        return 1.0

    assert "not ended after 1s" in end_alone(tmp_path, monkeypatch, refused)


def test_auto_follows_the_slowest_link(tmp_path):
    rank0 = Rank0(tmp_path, sync_every="auto", max_sync_overhead=0.1)
    scheduler = rank0.scheduler

    def heard(outer_step: int, num_bytes: int, seconds: float) -> int:
        rank0.line.emit(committed(outer_step, sent_bytes=num_bytes, send_s=seconds))
        scheduler.poll()
        return scheduler.sync_every_at(outer_step + 1)

    assert scheduler.sync_every_at(0) == LEAST and scheduler.step_of(7) == 0
    scheduler.speed.step_s = 0.5
    # 2 fragments of 2000 bytes at 1000 bytes a second: 4 s, a tenth of 80 steps.
    assert heard(0, 2000, 2.0) == 80 and scheduler.interval(1) == 40
    # The other fragment is half of that, and comes as fast.
    assert heard(1, 1000, 1.0) == 60
    rank0.line.state.sync_every = 120
    assert scheduler.sync_every_at(2) == 120, "another's link is slower"
    rank0.line.state.sync_every = 0
    assert heard(2, 2000, 2e6) == MOST


def test_auto_hides_what_takes_more_than_a_hundredth_of_the_steps():
    for cost_s, step_s, interval, delay in (
        (1.0, 1.0, 100, 0),
        (1.1, 1.0, 100, 2),  # a quarter to spare
        (10.0, 1.0, 100, 13),
        (99.0, 1.0, 100, 50),  # at most half of the steps
        (99.0, 1.0, 1, 0),
        (0.0, 1e-9, 4, 0),
    ):
        assert auto_delay(cost_s, step_s=step_s, interval=interval) == delay, cost_s


def test_the_delay_is_decided_once_after_two_rounds_and_the_warmup(tmp_path):
    """Of two fragments, each 50 steps after the other; the faster round counts."""
    how = {"sync_every": 100, "delay": "auto"}
    slow, fast = [40.0, 9.0], [4.0, 8.0]
    for why, costs, more, said in (
        ("too few rounds", slow, {}, []),
        ("half a round more", slow + fast[:1], {}, []),
        ("two rounds", slow + fast, {}, [Delay(10)]),
        ("a third", [0.0, 0.0, *slow, *fast], {}, [Delay(10)]),
        ("below a hundredth", [0.1] * 4, {}, [Delay(0)]),
        ("it is decided", slow + fast, {"delay": 0}, []),
    ):
        rank0 = Rank0(tmp_path, **how)
        rank0.scheduler.speed.step_s = 1.0
        assert rank0.plan(at(1, **{"costs": costs, "delay": None, **more})) == said, why
    for version, said in ((3, []), (4, [Delay(10)])):
        rank0 = Rank0(tmp_path, **how, warmup_rounds=2)
        rank0.scheduler.speed.step_s = 1.0
        state = at(1, costs=slow + fast, delay=None, version=version)
        assert rank0.plan(state) == said, "the warm-up may have shorter rounds"


# The files in its spool.


def averages(spool: Spool) -> str:
    """The last digits of the averages that are there."""
    return "".join(sorted(path.name[-1] for path in spool.folder.glob("average-????????")))


def test_the_spool_keeps_what_may_be_asked_for(tmp_path):
    spool = Spool(tmp_path, version=5, kept=2, since=5, most_bytes=0)
    for outer_step in range(6):
        spool.average(outer_step).touch()
        spool.contribution(outer_step).touch()
    spool.pulled.mkdir()
    (tmp_path / "average-00000001.partial").touch()
    spool.tidy()
    assert averages(spool) == "345"
    others = {path.name for path in tmp_path.iterdir() if not path.name.startswith("average-")}
    assert others == {"contribution-00000005", "pulled"}
    assert not list(tmp_path.glob("*.partial"))
    # Averages that a checkpoint lacks stay as long as there is room.
    spool = Spool(tmp_path, version=2, kept=1, since=2, most_bytes=30)
    for outer_step in (0, 1, 2, 3, 4, 5, 6, 7, 9):
        spool.average(outer_step).write_bytes(b"x" * 10)
    assert spool.has == 8, "one is missing"
    spool.version = 6
    spool.tidy()
    assert averages(spool) == "2345679"
    spool.version = 7
    spool.tidy()
    assert averages(spool) == "345679", "30 bytes"
    spool.since = 6
    spool.tidy()
    assert averages(spool) == "679"
    spool.version = 2
    assert spool.has == 2


def test_a_new_host_is_given_the_last_turns_without_a_gap(tmp_path):
    spool = Spool(tmp_path, version=3, kept=8, since=0, most_bytes=0)
    answers = [RoundAnswer(outer_step=t, state="committed", weights={"a": t}) for t in range(5)]
    for outer_step in (0, 2, 3, 4):
        spool.average(outer_step).touch()
        spool.note_answer(answers[outer_step])
    spool.note_outer_params(2, "f" * 64)
    found = [(answer.outer_step, digest) for answer, digest, _ in spool.kept_rounds()]
    assert found == [(2, "f" * 64), (3, ""), (4, "")]
    spool.version = 1
    assert spool.kept_rounds() == [(answers[0], "", spool.average(0))]
    spool.average(3).unlink()
    spool.version = 4
    assert spool.kept_rounds()[0][0].outer_step == 4

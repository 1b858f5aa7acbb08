"""When a cluster contributes, what it asks for, and what it makes of what it hears."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from isles.config.sections.outer import DiLoCoConfig
from isles.errors import ConfigError, UserError
from isles.outer.client.client import Alone
from isles.outer.client.spool import Spool
from isles.outer.codec import parse_codec
from isles.outer.layout import make_layout
from isles.outer.messages import Adopt, Apply, Command, Contribute, Lease, UseReserve
from isles.outer.trainer.sync import LEAST, Coordinator
from isles.run.paths import RunDir
from isles.train.record import Recorder

BATCH = 4
LAYOUT = make_layout({"a": (8,), "b": (8,)}, parse_codec("none"), num_fragments=2)


@dataclass
class State:
    """What a coordinator reads of an `Exchange`."""

    config: DiLoCoConfig = field(default_factory=DiLoCoConfig)
    num_fragments: int = 2
    version: int = 0
    steps: int = 0
    contributed_at: int = 0
    sent: tuple[int, ...] = ()
    has_learnt: bool = True
    step: int = 0
    samples_left: int = 10**6

    @property
    def progress(self) -> State:
        return self


NEW = State()


class Told(Alone):
    """A line on which a test speaks."""

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.emit(command)


def coordinator_of(
    folder: Path, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> tuple[Coordinator, Told]:
    spool = Spool(folder / "spool", version=0, kept=0, since=0, most_bytes=0)
    spool.folder.mkdir()
    line = Told(LAYOUT, "a", spool, next_sample=0)
    line.poll()
    recorder = Recorder(RunDir(folder), is_main=False, world_size=1)
    config = DiLoCoConfig(**{"sync_every": 8, "fragments": 2, **settings})
    return (
        Coordinator(
            replace(NEW, config=config),  # what it reads of it
            line,
            batch=BATCH,
            total_steps=100,
            recorder=recorder,
            clock=clock,
        ),
        line,
    )


def plan(coordinator: Coordinator, state: State) -> None:
    coordinator.exchange = state  # what it reads of it
    coordinator.plan()


def commands(coordinator: Coordinator, state: State) -> list[Command]:
    plan(coordinator, state)
    return coordinator.take_commands()


def committed(outer_step: int, **fields: Any) -> Apply:
    known = {"weights": {"a": 1}, "refused": {}, "size_bytes": 8}
    return Apply(outer_step=outer_step, path=Path("x"), **{**known, **fields})


def test_a_turn_is_due_every_so_many_steps(tmp_path: Path) -> None:
    coordinator, _ = coordinator_of(tmp_path)
    due = []
    state = NEW
    for step in range(1, 21):
        if commands(coordinator, replace(state, steps=step - 1, step=step - 1)):
            due.append(step)
            state = replace(state, version=state.version + 1, contributed_at=step)
    assert due == [4, 8, 12, 16, 20]


def test_rounds_of_the_warmup_are_shorter(tmp_path: Path) -> None:
    coordinator, _ = coordinator_of(tmp_path, warmup_rounds=2, warmup_sync_every=3)
    due = []
    state = NEW
    for step in range(1, 23):
        if commands(coordinator, replace(state, steps=step - 1, step=step - 1)):
            due.append(step)
            assert coordinator.step_of(state.version) == step
            state = replace(state, version=state.version + 1, contributed_at=step)
    assert due == [1, 3, 4, 6, 10, 14, 18, 22]
    assert [coordinator.sync_every_at(outer_step) for outer_step in (0, 3, 4)] == [3, 3, 8]


def test_a_fragment_under_way_is_not_contributed_again(tmp_path: Path) -> None:
    coordinator, _ = coordinator_of(tmp_path)
    state = replace(NEW, sent=(0,), contributed_at=4, steps=7, step=7)
    assert commands(coordinator, state) == [Contribute(1)]
    state = replace(state, sent=(0, 1), contributed_at=8, steps=90, step=90)
    assert commands(coordinator, state) == []
    assert commands(coordinator, replace(state, version=1, sent=(1,))) == [Contribute(2)]


def test_rounds_that_were_missed_are_not_made_up_for_by_empty_ones(tmp_path: Path) -> None:
    coordinator, _ = coordinator_of(tmp_path)
    state = replace(NEW, version=1, contributed_at=40, steps=41, step=41)
    assert commands(coordinator, state) == []
    assert commands(coordinator, replace(state, steps=43, step=43)) == [Contribute(1)]


def test_a_turn_that_closes_gets_what_there_is(tmp_path: Path) -> None:
    coordinator, line = coordinator_of(tmp_path)
    line.state.closing = 0, 3.0
    assert commands(coordinator, replace(NEW, has_learnt=False)) == []
    assert commands(coordinator, replace(NEW, steps=1, step=1)) == [Contribute(0)]
    assert commands(coordinator, replace(NEW, version=1, steps=2, contributed_at=2, step=2)) == []


def test_an_average_takes_the_step_to_that_of_the_others(tmp_path: Path) -> None:
    coordinator, line = coordinator_of(tmp_path)
    line.send(committed(0), committed(1))
    due = replace(NEW, steps=3, step=3)
    (first, second) = commands(coordinator, due)
    assert isinstance(first, Apply) and isinstance(second, Apply)
    assert (first.step, second.step) == (4, 8), "and no contribution before they are taken in"
    line.send(committed(99))
    (last,) = commands(coordinator, due)
    assert isinstance(last, Apply) and last.step == 100, "never beyond the end"


def test_samples_are_claimed_ahead_and_no_more_than_are_needed(tmp_path: Path) -> None:
    coordinator, line = coordinator_of(tmp_path)
    plan(coordinator, replace(NEW, samples_left=0))
    plan(coordinator, replace(NEW, samples_left=0))
    plan(coordinator, replace(NEW, samples_left=0))
    (leased,) = coordinator.take_commands()
    assert leased == Lease(((0, 8 * BATCH),))
    plan(coordinator, replace(NEW, samples_left=8 * BATCH - 1))
    assert coordinator.take_commands() == []  # it is asked for now, and heard of in the next step
    plan(coordinator, replace(NEW, samples_left=8 * BATCH - 1))
    assert coordinator.take_commands() == [Lease(((8 * BATCH, 16 * BATCH),))]
    plan(coordinator, replace(NEW, step=97, steps=97, contributed_at=97, samples_left=3 * BATCH))
    assert line.poll() == []
    plan(coordinator, replace(NEW, samples_left=0))
    coordinator.restock(is_late=True)
    assert isinstance(coordinator.take_commands()[-1], UseReserve)


def test_a_cluster_that_is_behind_contributes_nothing(tmp_path: Path) -> None:
    coordinator, line = coordinator_of(tmp_path)
    due = replace(NEW, steps=3, step=3)
    line.state.is_behind = True
    assert commands(coordinator, due) == []
    state = Adopt(version=5, paths=(), outer_params=(), source="b")
    line.send(committed(0), state)
    assert commands(coordinator, due) == [replace(state, step=20)]
    assert commands(coordinator, due) == []
    line.state.is_behind = False
    assert commands(coordinator, due) == [Contribute(0)]


def test_a_cluster_has_no_part_in_turns_that_were_decided_before_it_came(tmp_path: Path) -> None:
    coordinator, line = coordinator_of(tmp_path)
    line.state.decided, line.state.closing = 2, (1, 1.0)
    due = replace(NEW, steps=11, step=11)
    assert commands(coordinator, due) == []
    line.send(committed(0))
    (take,) = commands(coordinator, due)
    assert isinstance(take, Apply) and commands(coordinator, replace(due, version=1)) == []
    assert commands(coordinator, replace(due, version=2)) == [Contribute(2)]
    assert commands(coordinator, replace(due, version=1, sent=(1,))) == [Contribute(2)]


def test_who_is_not_let_in_hears_why(tmp_path: Path) -> None:
    now = 100.0
    coordinator, line = coordinator_of(tmp_path, lambda: now, deadline=5.0)
    line.state.is_joined = False
    line.state.lost_at, line.state.why = now, "hub:1 does not answer"
    now += 4.0
    assert coordinator.failure(is_new=True) is None
    now += 2.0
    late = coordinator.failure(is_new=True)
    assert late is not None
    assert "has not answered within 5s: hub:1 does not answer" in late.what
    assert coordinator.failure(is_new=False) is None, "it goes on alone"
    line.state.refusal = UserError("wrong token", where="hub:1", fix="paste it again")
    failure = coordinator.failure(is_new=False)
    assert isinstance(failure, ConfigError) and failure.where == "hub:1"


def test_auto_follows_the_slowest_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, line = coordinator_of(tmp_path, sync_every="auto", max_sync_overhead=0.1)
    assert coordinator.sync_every_at(0) == LEAST and coordinator.step_of(7) == 0
    coordinator.speed.step_s = 0.5
    line.send(committed(0, sent_bytes=1000, received_bytes=1000, send_s=1.0, receive_s=1.0))
    coordinator.poll()
    # 2 fragments of 2000 bytes at 1000 bytes a second: 4 s, a tenth of 80 steps.
    assert coordinator.sync_every_at(1) == 80 and coordinator.interval(1) == 40
    # The other fragment is a third of that, and comes as fast.
    line.send(committed(1, sent_bytes=400, received_bytes=600, send_s=0.4, receive_s=0.6))
    coordinator.poll()
    assert coordinator.sync_every_at(2) == 60
    line.state.sync_every = 120
    assert coordinator.sync_every_at(2) == 120

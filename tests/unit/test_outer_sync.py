"""When a cluster contributes, what it asks for, and what it makes of what it hears."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isles.config.sections.outer import DiLoCoConfig
from isles.errors import ConfigError, UserError
from isles.outer.client.client import Alone
from isles.outer.client.spool import Spool
from isles.outer.codec import parse_codec
from isles.outer.layout import make_layout
from isles.outer.messages import Adopt, Apply, Command, Contribute, Lease, UseReserve
from isles.outer.trainer.sync import LEAST, MOST, Coordinator
from isles.run.paths import RunDir
from isles.train.record import Recorder
from tests.each import each

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


def at(step: int, **more: Any) -> State:
    """After so many inner steps, all of them of this cluster."""
    return State(steps=step, step=step, **more)


class Told(Alone):
    """A line on which a test speaks."""

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.emit(command)


class Rank0:
    """A coordinator, and its line."""

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.monotonic, **settings: Any
    ) -> None:
        spool = Spool(folder / "spool", version=0, kept=0, since=0, most_bytes=0)
        spool.folder.mkdir()
        self.line = Told(LAYOUT, "a", spool, next_sample=0)
        self.line.poll()
        config = DiLoCoConfig(**{"sync_every": 8, "fragments": 2, **settings})
        self.coordinator = Coordinator(
            State(config),  # what it reads of it
            self.line,
            batch=BATCH,
            total_steps=100,
            recorder=Recorder(RunDir(folder), is_main=False, world_size=1),
            clock=clock,
        )

    def plan(self, state: State) -> list[Command]:
        self.coordinator.exchange = state  # what it reads of it
        self.coordinator.plan()
        return self.coordinator.take_commands()

    def due_steps(self, last: int) -> list[int]:
        """The inner steps after which it contributes, where every average comes at once."""
        due, version = [], 0
        for step in range(1, last + 1):
            contributed_at = due[-1] if due else 0
            if self.plan(at(step - 1, version=version, contributed_at=contributed_at)):
                assert self.coordinator.step_of(version) == step
                due.append(step)
                version += 1
        return due


def committed(outer_step: int, **fields: Any) -> Apply:
    known = {"weights": {"a": 1}, "refused": {}, "size_bytes": 8}
    return Apply(outer_step=outer_step, path=Path("x"), **{**known, **fields})


def test_a_turn_is_due_every_so_many_steps(tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    assert Rank0(tmp_path).due_steps(20) == [4, 8, 12, 16, 20]
    warm = Rank0(tmp_path / "warm", warmup_rounds=2, warmup_sync_every=3)
    assert warm.due_steps(22) == [1, 3, 4, 6, 10, 14, 18, 22]
    assert [warm.coordinator.sync_every_at(outer_step) for outer_step in (0, 3, 4)] == [3, 3, 8]


@each(
    ("why", "state", "heard", "contributes"),
    [
        ("its other fragment is under way", at(7, sent=(0,), contributed_at=4), {}, 1),
        ("both are", at(90, sent=(0, 1), contributed_at=8), {}, None),
        ("the first is back", at(90, version=1, sent=(1,), contributed_at=8), {}, 2),
        ("missed turns are not made up for", at(41, version=1, contributed_at=40), {}, None),
        ("but the next one is made", at(43, version=1, contributed_at=40), {}, 1),
        ("a turn that closes gets what there is", at(1), {"closing": (0, 3.0)}, 0),
        ("or nothing", at(0, has_learnt=False), {"closing": (0, 3.0)}, None),
        ("another closes", at(2, version=1, contributed_at=2), {"closing": (0, 3.0)}, None),
        ("it must take the state first", at(3), {"is_behind": True}, None),
        ("decided before it came", at(11), {"decided": 2, "closing": (1, 1.0)}, None),
        ("so is the next", at(11, version=1), {"decided": 2, "closing": (1, 1.0)}, None),
        ("the first that is not", at(11, version=2), {"decided": 2}, 2),
        ("nor is this", at(11, version=1, sent=(1,)), {"decided": 2}, 2),
    ],
)
def test_whether_a_cluster_contributes(
    tmp_path: Path, why: str, state: State, heard: dict[str, Any], contributes: int | None
) -> None:
    rank0 = Rank0(tmp_path)
    for name, value in heard.items():
        setattr(rank0.line.state, name, value)
    expected = [] if contributes is None else [Contribute(contributes)]
    assert rank0.plan(state) == expected, why


def test_an_average_takes_the_step_to_that_of_the_others(tmp_path: Path) -> None:
    rank0 = Rank0(tmp_path)
    rank0.line.send(committed(0), committed(1))
    # And no contribution before they are taken in.
    assert rank0.plan(at(3)) == [committed(0, step=4), committed(1, step=8)]
    rank0.line.send(committed(99))
    assert rank0.plan(at(3)) == [committed(99, step=100)], "never beyond the end"


def test_a_state_takes_the_place_of_averages(tmp_path: Path) -> None:
    rank0 = Rank0(tmp_path)
    rank0.line.state.is_behind = True
    state = Adopt(version=5, paths=(), outer_params=(), source="b")
    rank0.line.send(committed(0), state)
    assert rank0.plan(at(3)) == [replace(state, step=20)]
    assert rank0.plan(at(3)) == []


def test_samples_are_claimed_ahead_and_no_more_than_are_needed(tmp_path: Path) -> None:
    rank0 = Rank0(tmp_path)
    for _ in range(3):
        rank0.coordinator.exchange = State(samples_left=0)
        rank0.coordinator.plan()
    assert rank0.coordinator.take_commands() == [Lease(((0, 8 * BATCH),))], "asked for once"
    few = State(samples_left=8 * BATCH - 1)
    assert rank0.plan(few) == []  # it is asked for now, and heard of in the next step
    assert rank0.plan(few) == [Lease(((8 * BATCH, 16 * BATCH),))]
    rank0.plan(at(97, contributed_at=97, samples_left=3 * BATCH))
    assert rank0.line.poll() == [], "three steps are left"
    rank0.plan(State(samples_left=0))
    rank0.coordinator.restock(is_late=True)
    assert isinstance(rank0.coordinator.take_commands()[-1], UseReserve)


def test_who_is_not_let_in_hears_why(tmp_path: Path) -> None:
    now = 100.0
    rank0 = Rank0(tmp_path, lambda: now, deadline=5.0)
    coordinator, state = rank0.coordinator, rank0.line.state
    state.is_joined = False
    state.lost_at, state.why = now, "hub:1 does not answer"
    now += 4.0
    assert coordinator.failure(is_new=True) is None
    now += 2.0
    late = coordinator.failure(is_new=True)
    assert late is not None
    assert "has not answered within 5s: hub:1 does not answer" in late.what
    assert coordinator.failure(is_new=False) is None, "it goes on alone"
    state.refusal = UserError("wrong token", where="hub:1", fix="paste it again")
    failure = coordinator.failure(is_new=False)
    assert isinstance(failure, ConfigError) and failure.where == "hub:1"


def test_auto_follows_the_slowest_link(tmp_path: Path) -> None:
    rank0 = Rank0(tmp_path, sync_every="auto", max_sync_overhead=0.1)
    coordinator = rank0.coordinator

    def heard(outer_step: int, num_bytes: int, seconds: float) -> int:
        moved = {"sent_bytes": num_bytes, "send_s": seconds}
        rank0.line.send(committed(outer_step, **moved))
        coordinator.poll()
        return coordinator.sync_every_at(outer_step + 1)

    assert coordinator.sync_every_at(0) == LEAST and coordinator.step_of(7) == 0
    coordinator.speed.step_s = 0.5
    # 2 fragments of 2000 bytes at 1000 bytes a second: 4 s, a tenth of 80 steps.
    assert heard(0, 2000, 2.0) == 80 and coordinator.interval(1) == 40
    # The other fragment is half of that, and comes as fast.
    assert heard(1, 1000, 1.0) == 60
    rank0.line.state.sync_every = 120
    assert coordinator.sync_every_at(2) == 120, "another's link is slower"
    rank0.line.state.sync_every = 0
    assert heard(2, 2000, 2e6) == MOST

"""Engine gloo where clusters do not get together: the turn goes through the rendezvous."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.outer.hub.refusal import Refusal
from isles.outer.messages import Beat, EpochAnswer, Failed, Prepared, Ready
from tests.unit.test_outer_rendezvous import ZERO, World, member_id


class Gloo(World):
    """Clusters that are ready for turns, and cannot always average."""

    def begin(self, names: str) -> None:
        """These join."""
        for name in names:
            self.join(name)
        sql = "SELECT name, number FROM members"
        self.numbers = {row["name"]: row["number"] for row in self.core.book.rows(sql)}

    def ready(self, name: str, turn: int) -> EpochAnswer:
        """A cluster has its contribution."""
        ready = Ready(id=member_id(name), tokens=10, steps=1, samples=[], norm=1.0)
        answer = self.core.epochs.ready(self.numbers[name], turn, ready)
        self.core.drop_silent()
        return answer if answer.state != "waiting" else self.answer(name, turn)

    def answer(self, name: str, turn: int) -> EpochAnswer:
        """How it stands for a cluster."""
        return self.core.epochs.answer(self.numbers[name], turn)

    def fail(self, name: str, turn: int, **more: Any) -> None:
        """A cluster says that the epoch has come to nothing."""
        epoch = self.answer(name, turn).epoch
        failed = Failed(id=member_id(name), why="it does not work", **more)
        self.core.epochs.fail(self.numbers[name], epoch, failed)

    def prepare(self, names: str, turn: int) -> str:
        """All of an epoch have the average."""
        for name in names:
            prepared = Prepared(id=member_id(name), turn=turn, digest=ZERO, size_bytes=16)
            epoch = self.answer(name, turn).epoch
            state = self.core.epochs.prepared(self.numbers[name], epoch, prepared).state
        return state


def test_a_turn_of_clusters_that_do_not_reach_one_another_is_relayed(tmp_path: Path) -> None:
    world = Gloo(tmp_path)
    world.begin("abc")
    assert [world.ready(name, 0).state for name in "abc"] == ["waiting", "waiting", "formed"]
    world.fail("c", 0, apart=[(0, 1)])
    assert [world.ready(name, 0).state for name in "abc"] == ["relayed"] * 3
    assert world.answer("b", 0).why == "it does not work"
    world.complete("a", 0), world.complete("b", 0)
    # c comes only after the rendezvous was killed, which has forgotten why: what has come tells.
    world.restart()
    assert world.close() is None and world.ready("c", 0).state == "relayed"
    world.complete("c", 0)
    assert world.close() == ["a", "b", "c"]
    assert world.ready("a", 0).digest == ZERO

    # It has forgotten who is apart, and is told again; the next turns need no such try.
    assert [world.ready(name, 1).state for name in "abc"] == ["waiting", "waiting", "formed"]
    assert not world.answer("a", 1).have_met
    world.fail("a", 1, apart=[(0, 1), (1, 0)])
    for turn in (1, 2):
        assert [world.ready(name, turn).state for name in "abc"] == ["relayed"] * 3
        for name in "abc":
            world.complete(name, turn)
        assert world.close() == ["a", "b", "c"]
    # Without b the others meet; a turn that is relayed stays so, whoever goes.
    assert world.ready("a", 3).state == "relayed"
    world.core.leave(member_id("b"))
    assert world.ready("c", 3).state == "relayed"
    world.complete("a", 3), world.complete("c", 3)
    assert world.close() == ["a", "c"]
    assert [world.ready(name, 4).state for name in "ac"] == ["waiting", "formed"]
    assert world.prepare("ac", 4) == "committed"
    assert [world.ready(name, 5).state for name in "ac"] == ["waiting", "formed"]
    assert world.answer("c", 5).have_met
    assert len(world.events("relayed")) == 5


def test_after_some_failures_a_turn_is_relayed_and_later_it_is_tried_again(tmp_path: Path) -> None:
    world = Gloo(tmp_path, dead_after_s=1e6)
    world.begin("ab")
    for _ in range(3):
        assert [world.ready(name, 0).state for name in "ab"] == ["waiting", "formed"]
        world.fail("b", 0)
    assert world.ready("a", 0).state == "relayed"
    world.complete("a", 0), world.complete("b", 0)
    assert world.close() == ["a", "b"]
    world.now = 601.0
    assert [world.ready(name, 1).state for name in "ab"] == ["waiting", "formed"]
    assert world.prepare("ab", 1) == "committed"


def test_an_epoch_in_which_nothing_moves_has_an_end(tmp_path: Path) -> None:
    world = Gloo(tmp_path, dead_after_s=1e6)
    world.begin("ab")
    assert [world.ready(name, 0).state for name in "ab"] == ["waiting", "formed"]
    epoch = world.answer("a", 0).epoch
    for sent_bytes in range(3):  # as long as bytes move, however few, it goes on
        world.core.beat(Beat(id=member_id("b"), step=0, version=0, sent_bytes=sent_bytes))
        assert not world.core.drop_silent()
        world.now += 179.0
    prepared = Prepared(id=member_id("a"), turn=0, digest=ZERO, size_bytes=16)
    world.core.epochs.prepared(world.numbers["a"], epoch, prepared)
    assert not world.core.drop_silent()
    world.now += 181.0
    assert world.core.drop_silent()
    assert world.events("epoch_ended") == [
        ": epoch 1 of turn 0: nothing has moved for 180 s; it waited for b"
    ]
    with pytest.raises(Refusal, match="epoch 1 has ended"):
        world.core.epochs.prepared(world.numbers["a"], epoch, prepared)
    assert [world.ready(name, 0).state for name in "ab"] == ["waiting", "formed"]

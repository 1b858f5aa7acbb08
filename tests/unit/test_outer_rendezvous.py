"""The rendezvous's decisions, without network and with a clock that the test turns."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isles.errors import ConfigError
from isles.outer.client.blobs import Incoming, Sealed, WrongHash, digest_of, hash_chunks
from isles.outer.client.rate_limit import RateLimit
from isles.outer.hub.identity import lock_folder, make_identity
from isles.outer.hub.refusal import Refusal
from isles.outer.hub.rules import divergence, outliers
from isles.outer.messages import (
    CHUNK_BYTES,
    Failed,
    Prepared,
    Ready,
    StateFile,
    StateOffer,
)
from isles.run.join_line import JoinLine, encode
from tests.each import each
from tests.outer_world import ZERO, World, member_id

# The ledger of samples.

NAMES = st.sampled_from("abc")


class Ledger(RuleBasedStateMachine):
    """Clusters claim, train, contribute, die, come back; the rendezvous is killed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(Path(self.folder.name), wait="time_boxed", time_box_s=1.0)
        self.held: dict[str, list[tuple[int, int]]] = {}
        self.claims = Counter[str]()
        self.committed: dict[int, tuple[int, int]] = {}
        for name in "abc":
            self.world.join(name)
            self.held[name] = []

    @rule(name=NAMES, amount=st.integers(1, 40))
    def claim(self, name: str, amount: int) -> None:
        self.claims[name] += 1
        got = self.world.claim(name, self.claims[name], amount)
        assert sum(stop - start for start, stop in got) == amount
        assert self.world.claim(name, self.claims[name], amount) == got  # its answer was lost
        self.held[name] += got

    @rule(name=NAMES, part=st.floats(0.1, 1), is_sound=st.booleans())
    def contribute(self, name: str, part: float, is_sound: bool) -> None:
        held = self.held[name]
        done, self.held[name] = held[: int(len(held) * part)], held[int(len(held) * part) :]
        turn = self.world.core.turns.next
        if self.world.core.turns.is_counted(turn, _number(self.world, name)):
            turn += 1
        try:
            self.world.complete(name, turn, done, fault="" if is_sound else "nan")
        except Refusal as error:
            assert error.kind in ("refused", "early") or not is_sound
            self.held[name] += done

    @rule()
    def close(self) -> None:
        self.world.now += 1.0
        self.world.close()

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        _drop(self.world, name)

    @rule(name=NAMES)
    def come_back(self, name: str) -> None:
        self.world.beat(name)

    @rule(name=NAMES)
    def start_again(self, name: str) -> None:
        version = self.world.core.turns.next
        lost = self.world.join(name, version=version, holding=self.held[name]).lost
        gone = {n for start, stop in lost for n in range(start, stop)}
        numbers = [n for start, stop in self.held[name] for n in range(start, stop)]
        self.held[name] = [(n, n + 1) for n in numbers if n not in gone]
        self.claims[name] = 0

    @rule(name=NAMES)
    def stay_away_and_start_again(self, name: str) -> None:
        for other in "abc":
            self.world.beat(other)
        _drop(self.world, name, for_long=True)
        with pytest.raises(Refusal, match="does not know this cluster"):
            self.world.beat(name)
        self.start_again(name)

    @rule()
    def kill_the_rendezvous(self) -> None:
        self.world.restart()

    @invariant()
    def every_number_is_somewhere_and_what_is_committed_stays_so(self) -> None:
        samples = self.world.core.samples
        assert samples.audit() == []
        assert sum(samples.counts().values()) == samples.frontier
        rows = self.world.core.book.rows("SELECT * FROM samples WHERE state = 'committed'")
        now = {n: (r["member"], r["turn"]) for r in rows for n in range(r["start"], r["stop"])}
        assert self.committed.items() <= now.items()
        self.committed = now

    def teardown(self) -> None:
        """Whoever is left is dealt all that is not committed."""
        world = self.world
        for name in "bca":
            _drop(world, name, for_long=True)
        for _ in range(4):
            self.close()
        assert world.core.turns.state(world.core.turns.next) == "future"
        world.join("a", version=world.core.turns.next)
        frontier = world.core.samples.frontier
        if free := world.core.samples.counts().get("free", 0):
            assert all(stop <= frontier for _, stop in world.claim("a", 1, free))
        counts = world.core.samples.counts()
        assert set(counts) <= {"claimed", "committed"} and sum(counts.values()) == frontier
        self.every_number_is_somewhere_and_what_is_committed_stays_so()
        world.core.book.close()
        self.folder.cleanup()


class TestLedger(Ledger.TestCase):  # type: ignore[misc,name-defined]
    """Every sample number is committed at most once and none is lost."""

    settings = settings(max_examples=10, stateful_step_count=25, deadline=None)


def _number(world: World, name: str) -> int:
    return int(world.core.membership.find(member_id(name))["number"])


def _drop(world: World, name: str, *, for_long: bool = False) -> None:
    """Everybody is heard but one; for so long that its samples are dealt to others, or not."""
    for seconds in (11.0, 300.0) if for_long else (11.0,):
        world.now += seconds
        for row in world.core.membership.living():
            if row["name"] != name:
                world.core.membership.touch(row["number"])
        world.core.drop_silent()


def test_samples_that_were_dealt_to_another_meanwhile_are_not_counted_twice(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a"), world.join("b")
    assert world.claim("a", 1, 10) == [(0, 10)]
    _drop(world, "a")
    assert world.claim("b", 1, 4) == [(10, 14)]  # a may still come back
    world.join("b")
    _drop(world, "a", for_long=True)
    assert world.claim("b", 1, 4) == [(0, 4)]  # what was given back comes first
    with pytest.raises(Refusal, match="does not know this cluster"):
        world.beat("a")
    assert world.join("a", holding=[(0, 10)]).lost == [(0, 4)]
    assert world.complete("a", 0, [(0, 10)]) == 4
    assert world.complete("b", 0, [(0, 4)]) == 0
    world.close()
    assert world.core.samples.counts() == {"committed": 10, "free": 4}
    assert world.events("repeated") == ["a: turn 0: 4 samples had been dealt to others meanwhile"]
    with pytest.raises(Refusal, match="never been dealt"):
        world.complete("a", 1, [(10, 20)])


# When a turn is closed.


def test_a_ledger_that_was_lost_is_gone_on_with_by_what_clusters_hold(tmp_path: Path) -> None:
    world = World(tmp_path)
    first = world.join("a", version=7, holding=[(20, 28)])
    assert (first.standing, first.turn, first.lost) == ("first", 7, [])
    assert world.claim("a", 1, 2) == [(28, 30)], "none is dealt that was dealt before"
    second = world.join("b", version=7, holding=[(10, 15), (40, 44)])
    assert (second.standing, second.lost) == ("current", [(10, 15)])
    assert world.core.samples.counts() == {"claimed": 14, "committed": 30}
    assert world.core.samples.audit() == []
    world.complete("a", 7, [(20, 30)]), world.complete("b", 7, [(40, 44)])
    assert world.close() == ["a", "b"]
    assert world.core.samples.counts() == {"committed": 44}


def test_all_waits_for_the_living_and_names_them(tmp_path: Path) -> None:
    world = World(tmp_path, wait="all")
    for name in "abc":
        world.join(name)
    world.complete("a", 0)
    world.complete("c", 0)
    assert world.close() is None
    assert world.core.answer(0).waits_for == ["b"]
    world.now = 10.5
    world.beat("a"), world.beat("c")
    world.core.drop_silent()
    assert world.events("dropped") == ["b: not heard for 10.5 s"]
    assert world.close() == ["a", "c"]


def test_min_clusters_counts_on_nobody_who_has_finished(tmp_path: Path) -> None:
    world = World(tmp_path, min_clusters=2)
    world.join("a"), world.join("b")
    world.core.leave(member_id("b"))
    world.complete("a", 0)
    assert world.close() is None, "b pauses, and comes back"
    world.join("b")
    world.core.leave(member_id("b"), has_finished=True)
    assert world.close() == ["a"]


def test_a_cluster_that_lives_but_stands_still_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    world = World(tmp_path, wait="all", stalled_after_s=100.0)
    world.join("a"), world.join("b")
    world.beat("b", step=7)
    world.complete("a", 0)
    while world.now < 100.0:
        assert world.close() is None
        world.now += 5.0
        world.beat("b", step=7), world.beat("a", step=int(world.now))
        world.core.drop_silent()
    world.now += 1.0
    assert world.close() == ["a"]


def test_time_boxed_goes_on_without_the_late(tmp_path: Path) -> None:
    world = World(tmp_path, wait="time_boxed", time_box_s=5.0)
    world.join("a"), world.join("b")
    assert world.beat("b").open == []
    world.now = 100.0
    world.beat("b")
    world.complete("a", 0)
    world.now = 102.0
    [turn] = world.beat("b").open
    assert (turn.due_in_s, turn.contributed, turn.waits_for) == (3.0, ["a"], ["b"])
    assert world.close() is None
    world.now = 105.0
    assert world.close() == ["a"]
    with pytest.raises(Refusal) as caught:
        world.complete("b", 0)
    assert caught.value.kind == "late" and "turn 1" in caught.value.what
    world.complete("b", 1, tokens=30)
    world.complete("a", 1)
    assert world.close() == ["a", "b"]
    assert world.core.answer(1).weights == {"a": 10, "b": 30}


def test_quorum_has_a_grace(tmp_path: Path) -> None:
    world = World(tmp_path, wait="quorum", quorum=2, grace_s=3.0)
    for name in "abc":
        world.join(name)
    world.complete("a", 0)
    world.now = 50.0
    assert world.close() is None and world.beat("c").open[0].due_in_s is None
    world.complete("b", 0)
    world.now = 52.9
    assert world.close() is None
    world.now = 53.0
    assert world.close() == ["a", "b"]


def test_min_clusters_holds_a_turn_until_there_are_so_many(tmp_path: Path) -> None:
    world = World(tmp_path, wait="time_boxed", time_box_s=1.0, min_clusters=2)
    world.join("a")
    world.complete("a", 0)
    world.now = 500.0
    assert world.close() is None
    world.join("b")
    world.complete("b", 0)
    assert world.close() == ["a", "b"]


def test_a_newcomer_is_not_waited_for_in_a_turn_that_has_begun(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a")
    world.complete("a", 0)
    assert world.join("b").from_turn == 1
    assert world.close() == ["a"]
    world.complete("a", 1)
    assert world.close() is None


def test_a_turn_that_was_closed_is_averaged_over_the_same_after_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("b"), world.join("a")
    world.complete("a", 0, tokens=3)
    world.complete("b", 0, tokens=5)
    job = world.core.close_turn()
    world.restart()
    world.beat("a")
    assert world.core.close_turn() == job
    assert job is not None and [tokens for _, tokens in job.parts] == [3, 5]  # by name
    with pytest.raises(Refusal, match="decided without"):
        world.join("c")
        world.complete("c", 0)


# Who may join, and who is behind.


@each(
    ("change", "kind", "says"),
    [
        ({"identity": {"layout": "b"}}, "other_run", "layout is b in b and a in the run"),
        ({"codec": "int8"}, "other_run", "codec is int8 in b and none in the run"),
        ({"pieces": [[5]]}, "other_run", "pieces"),
        ({"called": "a"}, "name_taken", "called 'a'"),
        ({"version": 3}, "ahead", "applied 3 turns"),
        ({"protocol": 99}, "protocol", "version 99"),
    ],
)
def test_who_does_not_fit_is_told_why(tmp_path: Path, change: dict, kind: str, says: str) -> None:
    world = World(tmp_path, max_clusters=2)
    world.join("a")
    with pytest.raises(Refusal) as caught:
        world.join("b", **change)
    assert caught.value.kind == kind and says in caught.value.what
    world.join("b")
    with pytest.raises(Refusal, match="2 at most may"):
        world.join("c")


def test_a_dead_clusters_name_can_be_taken_over(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a"), world.join("b")
    world.claim("a", 1, 8)
    _drop(world, "a")
    world.join("b2", called="a")
    with pytest.raises(Refusal, match="does not know this cluster"):
        world.beat("a")


def test_standings_and_stragglers(tmp_path: Path) -> None:
    world = World(tmp_path, fragments=2, keep_averages=3)
    assert world.join("a").standing == "first"
    assert world.join("b").standing == "current"
    assert world.join("c", outer_params="1" * 64).standing == "behind"  # other initial weights
    for turn in range(6):
        world.complete("a", turn)
        world.complete("b", turn)
        assert world.close() == ["a", "b"]
        world.applied("a", turn, f"{turn + 1:064x}")
        if turn < 2:
            world.applied("b", turn, f"{turn + 1:064x}")
    # The third average was kept until the sixth was there: b has missed too many.
    assert world.beat("b").order == "pull" and "turn 2" in world.beat("b").order_reason
    with pytest.raises(Refusal, match="must pull the state"):
        world.complete("b", 6)
    outer_params = [f"{5:064x}", f"{4:064x}"]
    late = world.join(
        "b", version=5, outer_params=outer_params
    )  # turns 3 and 4 are of fragments 1 and 0
    assert late.standing == "late"
    assert world.join("b", version=4, outer_params=outer_params).standing == "behind"
    assert world.join("b", version=2, outer_params=outer_params).standing == "behind"
    assert not world.core.answer(2).is_kept and world.core.answer(3).is_kept


def test_nobody_is_behind_by_what_was_known_of_him_before(tmp_path: Path) -> None:
    """That the first turn was applied is on its way, or lost with another host, as others go on."""
    world = World(tmp_path, keep_averages=1)
    world.join("a"), world.join("b")
    for turn in range(2):
        world.complete("a", turn), world.complete("b", turn)
        assert world.close() == ["a", "b"]
    assert world.beat("a", version=1).order == "" and world.beat("b", version=2).order == ""
    world.restart()
    assert world.join("c").standing == "behind"
    assert world.core.want_state(member_id("c")).donor == "b"
    world.complete("a", 2), world.complete("b", 2)
    assert world.close() == ["a", "b"]
    assert world.beat("a", version=1).order == "pull"


def test_who_has_kept_what_it_lacks_needs_nobody(tmp_path: Path) -> None:
    world = World(tmp_path, keep_averages=1)
    world.join("a"), world.join("b")
    for turn in range(6):
        world.complete("a", turn), world.complete("b", turn), world.close()
    assert world.join("a", version=2).standing == "behind"
    assert world.join("a", version=2, has=4).standing == "behind", "one is missing"
    assert world.join("a", version=2, has=5).standing == "late"
    assert world.join("b", version=2, has=99).standing == "late"
    assert world.join("c").standing == "behind"
    assert world.core.want_state(member_id("c")).donor == "", "theirs are as old"
    world.core.epochs.want_average(_number(world, "c"), 2)
    assert world.beat("b", version=5, has=6).upload_average is None, "it is too late for that"
    assert world.core.want_state(member_id("c")).donor == "b"
    assert world.beat("a", version=3, has=6).order == ""
    assert world.beat("a", version=4, has=4).order == "pull", "its disk has lost one"


def test_who_has_other_weights_pulls_the_state(tmp_path: Path) -> None:
    world = World(tmp_path)
    for name in "abc":
        world.join(name)
    for name in "abc":
        world.complete(name, 0)
    world.close()
    world.applied("a", 0, "a" * 64)
    world.applied("c", 0, "c" * 64)
    assert world.beat("c").order == "pull"  # one against one: who joined first is right
    world.applied("b", 0, "c" * 64)
    assert world.beat("a").order == "pull" and world.beat("c").order == ""
    assert [text.split(":")[0] for text in world.events("diverged")] == ["c", "a"]
    assert divergence({1: "x", 2: "y", 3: "y"}) == ("y", [1])


def test_who_comes_when_all_others_have_finished_hears_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a"), world.complete("a", 0), world.close()
    assert world.join("n", outer_params="1" * 64).standing == "behind"
    world.core.leave(member_id("a"))
    assert world.core.want_state(member_id("n")).donor == "", "a pauses, and will give it"
    world.join("a", version=1)
    world.core.leave(member_id("a"), has_finished=True)
    with pytest.raises(Refusal, match="the other clusters have finished this run"):
        world.core.want_state(member_id("n"))


def test_a_state_is_asked_of_the_most_advanced_and_of_another_if_it_is_idle(tmp_path: Path) -> None:
    world = World(tmp_path, donor_s=20.0, keep_averages=2, dead_after_s=1000.0)
    world.join("a"), world.join("b")
    for turn in range(3):
        world.complete("a", turn), world.complete("b", turn)
        world.close()
        world.applied("a", turn, f"{turn + 1:064x}"), world.applied("b", turn, f"{turn + 1:064x}")
    assert world.join("n").standing == "behind"
    assert world.core.want_state(member_id("n")).donor == "a"
    assert world.beat("a").donate and not world.beat("n").donate
    world.now = 21.0
    assert world.core.want_state(member_id("n")).donor == "b"  # a has sent nothing
    assert world.beat("b").donate and not world.beat("a").donate
    offer = StateOffer(
        id=member_id("b"),
        version=3,
        outer_params=[f"{3:064x}"],
        files=[StateFile(name="outer-params.safetensors", size_bytes=10, digest=ZERO)],
    )
    number = world.core.offer_state(offer)
    assert world.core.offer_state(offer) == number  # it goes on
    with pytest.raises(Refusal, match="not the run's"):
        world.core.offer_state(offer.model_copy(update={"outer_params": [ZERO]}))
    world.core.states.complete(number)
    world.core.leave(member_id("a"))
    for turn in range(3, 9):  # its averages stay as long as somebody pulls
        world.complete("b", turn)
        assert world.close() == ["b"]
        world.applied("b", turn, f"{turn + 1:064x}")
        world.now += 100.0
        world.core.states.touch()
    answer = world.core.want_state(member_id("n"))
    assert (answer.state, answer.version) == (number, 3) and world.core.answer(3).is_kept
    world.now += 1000.0
    world.complete("b", 9)
    world.close()
    assert not world.core.answer(3).is_kept and world.core.answer(8).is_kept
    assert world.core.want_state(member_id("n")).state is None


# Updates that nobody should average.


def test_outliers_and_what_is_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    world = World(tmp_path, outlier=10.0)
    world.join("a"), world.join("b")
    for turn in range(3):
        world.complete("a", turn), world.complete("b", turn)
        assert world.close() == ["a", "b"]
    claimed = world.claim("b", 1, 5)
    world.complete("a", 3), world.complete("b", 3, claimed, norm=10.5)
    assert world.close() == ["a"]
    assert "its norm 10.5 is above 10" in world.core.answer(3).refused["b"]
    assert world.events("refused")[0].startswith("b: turn 3: its norm 10.5")
    assert world.core.samples.counts() == {"claimed": 5}  # still b's, not counted
    with pytest.raises(Refusal, match=r"contribution of b to turn 4 is refused: .*nan"):
        world.complete("b", 4, norm=float("nan"))
    assert world.beat("b").order == "reset"
    world.complete("a", 4)
    assert world.close() == ["a"]
    world.core.obeyed(member_id("b"))
    assert world.beat("b").order == ""
    world.complete("b", 5), world.complete("a", 5)
    assert world.close() == ["a", "b"]


@each(
    ("contributions", "found"),
    [
        ({1: (1.0, 100), 2: (9.0, 100)}, []),
        ({1: (1.0, 100), 2: (11.0, 100)}, [2]),
        ({1: (1.0, 100), 2: (11.0, 200)}, []),  # twice the tokens: twice the norm may be
        ({1: (1.0, 100), 2: (5.0, 1)}, []),  # few tokens never count against a cluster
        ({1: (50.0, 100), 2: (60.0, 100)}, []),  # what all do is nobody's fault
    ],
)
def test_outliers(contributions: dict, found: list[int]) -> None:
    assert sorted(outliers(10.0, [(1.0, 100)] * 4, contributions)) == found
    assert outliers(10.0, [(1.0, 100)] * 3, contributions) == {}  # too little to judge by


def test_where_all_are_refused_the_turn_changes_nothing_and_nobody_waits(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a")
    with pytest.raises(Refusal):
        world.complete("a", 0, norm=float("inf"))
    assert world.close() == []
    answer = world.core.answer(0)
    assert (answer.state, answer.size_bytes, answer.weights) == ("committed", 0, {})
    world.complete("a", 1)
    assert world.close() == ["a"]


# Epochs: members that average directly.


def _ready(name: str, tokens: int = 10, samples=(), norm: float = 1.0) -> Ready:
    return Ready(id=member_id(name), tokens=tokens, steps=1, samples=list(samples), norm=norm)


def _prepared(name: str, turn: int, digest: str = ZERO) -> Prepared:
    return Prepared(id=member_id(name), turn=turn, digest=digest, size_bytes=16)


def test_a_turn_is_committed_once_all_of_an_epoch_have_the_same(tmp_path: Path) -> None:
    world = World(tmp_path)
    for name in "abc":
        world.join(name)
    claimed = {name: world.claim(name, 1, 5) for name in "abc"}
    epochs, numbers = world.core.epochs, {name: _number(world, name) for name in "abc"}

    def ready(*names: str) -> list[str]:
        return [
            epochs.ready(numbers[name], 0, _ready(name, samples=claimed[name])).state
            for name in names
        ]

    assert ready("c", "a") == ["waiting", "waiting"]
    assert epochs.answer(numbers["a"], 0).waits_for == ["b"] and not world.core.drop_silent()
    ready("b")
    assert world.core.drop_silent()
    first = epochs.answer(numbers["b"], 0)
    assert (first.state, first.rank, first.members) == ("formed", 1, ["a", "b", "c"])
    epochs.put(numbers["a"], first.epoch, "0/1", b"address")
    assert epochs.get(numbers["b"], first.epoch, "0/1") == b"address"
    # b dies in the middle: the others go on with what they have, and wait for nobody else.
    epochs.prepared(numbers["a"], first.epoch, _prepared("a", 0))
    _drop(world, "b")
    with pytest.raises(Refusal, match=f"epoch {first.epoch} has ended"):
        epochs.prepared(numbers["c"], first.epoch, _prepared("c", 0))
    assert world.events("epoch_ended") == [": epoch 1 of turn 0: b is gone"]
    assert ready("a", "c") == ["waiting", "waiting"] and world.core.drop_silent()
    second = epochs.answer(numbers["c"], 0)
    assert second.epoch > first.epoch and second.members == ["a", "c"]
    # They have got different bytes: nobody applies any.
    epochs.prepared(numbers["a"], second.epoch, _prepared("a", 0))
    with pytest.raises(Refusal):
        epochs.prepared(numbers["c"], second.epoch, _prepared("c", 0, "1" * 64))
    assert "different averages (a: 0000" in world.events("epoch_ended")[1]
    # The rendezvous is killed; it does not give the number of an epoch twice.
    world.restart()
    epochs = world.core.epochs
    ready("a", "c")
    assert world.core.drop_silent()
    third = epochs.answer(numbers["a"], 0)
    assert third.epoch == second.epoch + 1
    assert epochs.prepared(numbers["a"], third.epoch, _prepared("a", 0)).state == "formed"
    assert epochs.prepared(numbers["c"], third.epoch, _prepared("c", 0)).state == "committed"
    # a's answer was lost on the way.
    assert epochs.prepared(numbers["a"], third.epoch, _prepared("a", 0)).digest == ZERO
    assert world.core.answer(0).weights == {"a": 10, "c": 10}
    assert world.core.samples.counts() == {"committed": 10, "claimed": 5}
    assert world.beat("b").order == ""  # a or c will give it what it missed
    with pytest.raises(Refusal, match="decided without b"):
        epochs.ready(numbers["b"], 0, _ready("b"))
    epochs.want_average(numbers["b"], 0)
    assert [world.beat(name).upload_average for name in "abc"] == [0, None, None]


def test_an_epoch_is_time_boxed_and_leaves_outliers_out(tmp_path: Path) -> None:
    world = World(tmp_path, wait="time_boxed", time_box_s=30.0, outlier=10.0)
    world.join("a"), world.join("b"), world.join("c")
    epochs, numbers = world.core.epochs, {name: _number(world, name) for name in "abc"}

    def commit(turn: int, names: str) -> None:
        epoch = epochs.answer(numbers[names[0]], turn)
        assert epoch.members == list(names)
        for name in names:
            epochs.prepared(numbers[name], epoch.epoch, _prepared(name, turn))
        assert epochs.answer(numbers[names[0]], turn).state == "committed"

    for turn in range(2):
        for name in "abc":
            epochs.ready(numbers[name], turn, _ready(name))
        assert world.core.drop_silent()
        commit(turn, "abc")
    for name, norm in (("a", 10.5), ("b", 1.0)):
        epochs.ready(numbers[name], 2, _ready(name, norm=norm))
    (told,) = world.beat("c").open  # the slow one learns that it shall give what it has
    assert (told.turn, told.due_in_s, told.waits_for) == (2, 30.0, ["c"])
    assert not world.core.drop_silent()
    world.now += 31.0
    for name in "abc":
        world.beat(name)
    while epochs.answer(numbers["b"], 2).state == "waiting":
        assert world.core.drop_silent()
    with pytest.raises(Refusal, match=r"a to turn 2 is refused: its norm 10\.5"):
        epochs.ready(numbers["a"], 2, _ready("a", norm=10.5))
    commit(2, "b")
    assert world.core.answer(2).weights == {"b": 10} and "a" in world.core.answer(2).refused
    # What a has sent cannot be decoded: whoever was to average it names it.
    for name in "abc":
        epochs.ready(numbers[name], 3, _ready(name))
    assert world.core.drop_silent()
    broken = epochs.answer(numbers["c"], 3).epoch
    failed = Failed(id=member_id("c"), why="the contribution of a is unsound: nan", culprit=0)
    epochs.fail(numbers["c"], broken, failed)
    with pytest.raises(Refusal, match="a to turn 3 is refused: c says: the contribution of a is"):
        epochs.ready(numbers["a"], 3, _ready("a"))
    for name in "bc":
        epochs.ready(numbers[name], 3, _ready(name))
    assert world.core.drop_silent()
    commit(3, "bc")


# Files, lines, secrets.


def test_a_file_survives_a_crash_as_far_as_its_bytes_do(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(2 * CHUNK_BYTES + 5)
    source = tmp_path / "source"
    source.write_bytes(data)
    hashes = hash_chunks(source)
    path = tmp_path / "in" / "file"
    incoming = Incoming(path, len(data))
    for index in (2, 0):
        incoming.put(index, data[index * CHUNK_BYTES :][:CHUNK_BYTES], hashes[index])
    with pytest.raises(WrongHash, match="chunk 1 has sha256"):
        incoming.put(1, bytes(CHUNK_BYTES), hashes[1])
    assert incoming.seal(digest_of(hashes)) == [1]
    incoming.close()
    with path.open("r+b") as stream:  # a page that never reached the disk
        stream.seek(100)
        stream.write(b"torn")
    again = Incoming(path, len(data))
    assert sorted(again.received()) == [2]
    for index in (0, 1):
        again.put(index, data[index * CHUNK_BYTES :][:CHUNK_BYTES], hashes[index])
    assert again.seal(ZERO) == [0, 1, 2]
    assert again.seal(digest_of(hashes)) == [] and path.read_bytes() == data
    again.put(0, data[:CHUNK_BYTES], hashes[0])  # the same again is no fault
    with pytest.raises(Sealed):
        again.put(0, data[1 : CHUNK_BYTES + 1], hash_chunks_of(data[1 : CHUNK_BYTES + 1]))
    again.close()


def hash_chunks_of(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_join_line_survives_a_mail_and_shows_no_secret(tmp_path: Path) -> None:
    token = encode(bytes(range(32)))
    line = JoinLine("::1", 8443, "llama-1", token, bytes(32))
    text = line.secret_text()
    assert JoinLine.parse(f" {text[:30]}\n  {text[30:]}\n") == line
    assert token not in str(line) and token not in repr(line)
    for broken in (
        text[:-1],
        text.replace("isles:", "https:"),
        "",
        text.replace(":8443", ":99999"),
    ):
        with pytest.raises(ConfigError) as caught:
            JoinLine.parse(broken)
        assert token not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        JoinLine.read(tmp_path / "nowhere")


def test_secrets_are_for_their_owner_alone_and_folders_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = make_identity(tmp_path)
    again = make_identity(tmp_path)
    assert (again.token, again.fingerprint) == (identity.token, identity.fingerprint)
    for name in ("token", "key.pem", "certificate.pem"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    identity.ssl_context()
    (tmp_path / "other").mkdir()
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    other = make_identity(tmp_path / "other")  # by openssl
    other.ssl_context()
    assert other.fingerprint != identity.fingerprint
    assert {p.name for p in (tmp_path / "other").iterdir()} == {
        "token",
        "key.pem",
        "certificate.pem",
    }
    lock_folder(tmp_path)
    with pytest.raises(ConfigError, match="another rendezvous"):
        lock_folder(tmp_path)


def test_a_pace_is_kept_to_one_percent() -> None:
    now = 0.0
    pace = RateLimit(1000.0, lambda: now)
    for _ in range(200):
        now += pace.delay(64)
    assert 200 * 64 / 1000.0 * 0.99 < now + 0.05 < 200 * 64 / 1000.0 * 1.01

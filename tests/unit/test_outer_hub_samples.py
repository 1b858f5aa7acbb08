"""Which samples the hub leases to whom, whatever clusters and killed hubs do."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isles.outer.hub.rules import Refusal
from isles.outer.hub.samples import AVERAGED, FREE
from isles.outer.messages import LAST_SAMPLE, MOST_LEASED, MOST_SPANS
from isles.outer.samples import RESERVE, Interval, joined
from tests.outer_world import World, member_id, overlaps, refused

# The ledger.

NAMES = st.sampled_from("abc")


class Ledger(RuleBasedStateMachine):
    """Clusters claim, train, contribute, die, come back; the hub is killed in between.

    No block is leased to two, none is lost, and what is averaged is not leased again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(Path(self.folder.name), "abc", wait="time_boxed", time_box_s=1.0)
        self.held: dict[str, list[int]] = {name: [] for name in "abc"}
        """By cluster: what it may train on, in the order in which it reads."""
        self.sent: dict[tuple[str, int], list[int]] = {}
        self.leases = Counter[str]()
        self.averaged: set[int] = set()
        self.read: set[int] = set()

    @rule(name=NAMES, amount=st.integers(1, 40))
    def lease(self, name: str, amount: int) -> None:
        self.leases[name] += 1
        got = self.world.lease(name, self.leases[name], amount)
        assert sum(stop - start for start, stop in got) >= amount
        assert self.world.lease(name, self.leases[name], amount) == got  # its answer was lost
        self.held[name] += _numbers(got)

    @rule(name=NAMES, part=st.floats(0.1, 1), is_sound=st.booleans())
    def contribute(self, name: str, part: float, is_sound: bool) -> None:
        rounds, number = self.world.core.rounds, self.world.number(name)
        outer_step = rounds.next + int(rounds.is_counted(rounds.next, number))
        if rounds.is_counted(outer_step, number):
            return
        count = int(len(self.held[name]) * part)
        given, left = self.held[name][:count], self.held[name][count:]
        spans = joined([(n, n + 1) for n in given])
        try:
            self.world.complete(name, outer_step, spans, failure="" if is_sound else "nan")
        except Refusal as error:
            assert error.kind in ("refused", "early")
            return
        self.sent[name, outer_step], self.held[name] = given, left

    @rule()
    def close(self) -> None:
        self.world.now += 1.0
        outer_step = self.world.core.rounds.next
        others = {name: self._of_others(name) for name in "abc"}
        names = self.world.close()
        for name in "abc":
            numbers = self.sent.pop((name, outer_step), [])
            if name in (names or ()):
                self.averaged |= set(numbers) - others[name]
            elif names is not None:
                self.held[name] = sorted({*numbers, *self.held[name]})
            elif numbers:
                self.sent[name, outer_step] = numbers

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        self.world.drop(name)

    @rule(name=NAMES)
    def come_back(self, name: str) -> None:
        self.world.heartbeat(name)

    @rule(name=NAMES)
    def pause(self, name: str) -> None:
        self.world.leave(name)
        self.start_again(name)

    @rule(name=NAMES)
    def start_again(self, name: str) -> None:
        version = self.world.core.rounds.next
        sent = [n for (who, _), numbers in self.sent.items() if who == name for n in numbers]
        holding = joined([(n, n + 1) for n in [*self.held[name], *sent]])
        lost = set(_numbers(self.world.join(name, version=version, holding=holding).lost))
        assert not lost & set(self.held[name]) - self._of_others(name), "its own block"
        self.held[name] = [n for n in self.held[name] if n not in lost]
        self.leases[name] = 0

    def _of_others(self, name: str) -> set[int]:
        """What is averaged, or lies in blocks of another."""
        return self._blocks("owner NOT IN (?, ?)", FREE, self.world.number(name))

    def _blocks(self, where: str, *values: int) -> set[int]:
        sql = f"SELECT start, stop FROM blocks WHERE {where}"
        return set(_numbers(map(tuple, self.world.core.journal.rows(sql, *values))))

    @rule(name=NAMES)
    def stay_away_and_start_again(self, name: str) -> None:
        for other in "abc":
            self.world.heartbeat(other)
        self.world.drop(name, for_long=True)
        assert "does not know this cluster" in refused(self.world.heartbeat, name).what
        self.start_again(name)

    @rule()
    def kill_the_hub(self) -> None:
        self.world.restart()

    @invariant()
    def every_number_is_in_one_block_and_what_is_averaged_stays_so(self) -> None:
        samples = self.world.core.samples
        assert overlaps(self.world.core.journal) == []
        assert sum(samples.counts().values()) == samples.frontier
        before, self.read = self.read, self._blocks("owner = ?", AVERAGED)
        assert before <= self.read

    def teardown(self) -> None:
        """Whoever is left is leased all that is not averaged."""
        world = self.world
        for name in "bca":
            world.drop(name, for_long=True)
        for _ in range(4):
            self.close()
        assert world.core.rounds.state(world.core.rounds.next) == "future"
        world.join("a", version=world.core.rounds.next)
        frontier = world.core.samples.frontier
        if free := world.core.samples.counts().get("free", 0):
            given = world.lease("a", 1, free)
            assert all(stop <= frontier for _, stop in given)
            assert not set(_numbers(given)) & self.averaged, "no averaged sample is leased again"
        counts = world.core.samples.counts()
        assert set(counts) <= {"leased", "averaged"} and sum(counts.values()) == frontier
        world.core.journal.close()
        self.folder.cleanup()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)


def _numbers(spans: Iterable[Interval]) -> list[int]:
    return [number for start, stop in spans for number in range(start, stop)]


def test_a_cluster_that_comes_back_goes_on_in_its_own_block(tmp_path):
    world = World(tmp_path, "ab")
    assert world.lease("a", 1, 10) == [(0, 10)]
    world.complete("a", 0, [(0, 4)]), world.turn("b", 0)
    world.drop("a")
    assert world.lease("b", 1, 4) == [(10, 14)], "a may still come back"
    # It goes on from a checkpoint before the average that has four of its samples.
    assert world.join("a", version=1, holding=[(0, 10)]).lost == [(0, 4)]
    world.leave("a")
    assert world.lease("b", 2, 4) == [(14, 18)], "it pauses"
    assert world.join("a", version=1, holding=[(4, 10)]).lost == []
    world.drop("a", for_long=True)
    assert world.lease("b", 3, 2) == [(4, 6)], "what was given back comes first"
    assert "does not know this cluster" in refused(world.heartbeat, "a").what
    assert world.join("a", version=1, holding=[(4, 10)]).lost == [(4, 6)]
    assert world.core.samples.counts() == {"averaged": 4, "leased": 14}


def test_blocks_of_a_hub_that_was_lost_are_gone_on_with(tmp_path):
    world = World(tmp_path)
    first = world.join("a", version=7, holding=[(20, 28)])
    assert (first.standing, first.outer_step, first.lost) == ("first", 7, [])
    assert world.lease("a", 1, 2) == [(28, 30)], "none is leased that was leased before"
    second = world.join("b", version=7, holding=[(10, 15), (40, 44)])
    assert (second.standing, second.lost) == ("current", [])
    third = world.join("c", version=7, holding=[(12, 22)])
    assert third.lost == [(12, 15), (20, 22)], "others came before it"
    world.complete("a", 7, [(20, 30)]), world.complete("b", 7, [(10, 15), (40, 42)])
    assert world.turn("c", 7) == ["a", "b", "c"]
    assert world.core.samples.counts() == {"averaged": 17, "leased": 7}


# Numbers and pieces of members that mean harm.


def test_numbers_that_were_never_leased_are_nobodys(tmp_path):
    world = World(tmp_path, "a")
    assert world.lease("a", 1, 100) == [(0, 100)]
    for holding in ([(0, 2**62 - 1)], [(RESERVE - 1, RESERVE)], [(100, 101)], [(2**40, 2**41)]):
        answer = world.join("e", holding=holding)
        assert answer.lost and world.core.samples.frontier == 100
        assert type(answer).model_validate_json(answer.model_dump_json()) == answer
    assert world.lease("a", 2, 100) == [(100, 200)]
    world.complete("e", 0, [(0, 2**62 - 1)]), world.turn("a", 0)
    assert world.core.samples.counts() == {"leased": 200}, "another's samples are not averaged"
    world.leave("e", has_finished=True)
    assert world.lease("a", 3, 100) == [(200, 300)]
    assert overlaps(world.core.journal) == []


def test_a_journal_of_isles_0_1_with_such_numbers_is_gone_on_with(tmp_path):
    world = World(tmp_path, "ab")
    world.lease("a", 1, 100)
    run = world.core.journal.run
    run("INSERT INTO blocks VALUES (100, ?, ?)", 2**62 - 1, world.number("b"))
    spans = json.dumps([[0, 2**62 + 100]])
    run("UPDATE members SET claim = 5, claimed = ? WHERE id = ?", spans, member_id("a"))
    world.complete("a", 0, [(0, 10)]), world.complete("b", 0)
    bad = json.dumps([[5, 3], [4, 4], [0, 2**62 - 1]])
    run("UPDATE parts SET spans = ? WHERE member = ?", bad, world.number("b"))
    world.restart()
    assert world.close() == ["a", "b"]
    assert world.lease("a", 5, 10) == [(100, 110)] == world.lease("a", 5, 10)
    assert world.core.samples.counts() == {"averaged": 10, "leased": 100}
    # And a hub that follows a lost one believes numbers of its time, but no others.
    (tmp_path / "later").mkdir()
    later = World(tmp_path / "later")
    later.join("a", version=7, holding=[(20, 28)])
    later.join("e", version=7, holding=[(40, 44), (2**50, 2**50 + 1)])
    assert later.core.samples.frontier < 2**41 < LAST_SAMPLE
    assert later.lease("a", 1, 8)


def test_pieces_of_samples_stay_few_however_they_are_cut(tmp_path):
    world = World(tmp_path, "ae", max_clusters=2)
    count = "SELECT COUNT(*) FROM blocks"
    for number in range(1, 4):
        given = world.lease("e", number, 2 * MOST_SPANS)
        spans = [(n, n + 1) for start, stop in given for n in range(start, stop, 2)][:MOST_SPANS]
        world.complete("e", number - 1, spans), world.turn("a", number - 1)
        assert world.core.journal.number(count) <= 4 * MOST_SPANS + 4
        world.leave("e", has_finished=True), world.join("e", version=number)
    assert "too many pieces" in world.events("samples")[0]
    lost = world.join(
        "e", version=3, holding=[(n, n + 1) for n in range(0, 2 * MOST_SPANS, 2)]
    ).lost
    assert len(lost) <= 2 * MOST_SPANS
    found = world.lease("a", 1, 2**20)
    assert len(found) <= 65 and sum(stop - start for start, stop in found) == 2**20
    assert overlaps(world.core.journal) == []


def test_who_hoards_samples_is_stopped_and_others_are_not(tmp_path):
    world = World(tmp_path, "ae")
    world.lease("e", 1, MOST_LEASED), world.lease("e", 2, MOST_LEASED)
    assert refused(world.lease, "e", 3, 1).kind == "too_many"
    assert world.lease("a", 1, 8) == [(2 * MOST_LEASED, 2 * MOST_LEASED + 8)]
    world.drop("e", for_long=True)
    assert world.lease("a", 2, 8) == [(0, 8)], "what it had is given to others, as much as asked"

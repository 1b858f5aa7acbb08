"""What members leave behind at the hub: files, rows, events and lines stay few."""

from __future__ import annotations

import logging

from isles.outer.hub.core import events, live, status
from isles.outer.messages import LeaveRun, ShownRecord
from isles.run.relay import LONGEST
from isles.run.repeats import FewLines, Repeats
from tests.outer_world import ZERO, World, after, joining, member_id, refused

HUGE = 2**61


def test_what_members_leave_behind_is_bounded_by_name_and_in_all(tmp_path):
    world = World(tmp_path, "a", max_clusters=2, dead_after_s=10.0)
    core = world.core

    def files() -> int:
        core.sweep()
        return len(list(tmp_path.rglob("*.part")))

    def begin(name: str) -> None:
        for outer_step in range(8):
            path = world.do(core.part_path, member_id(name), outer_step)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")

    for number in range(30):  # one name, with a new id each time; and a new name
        for name, own in ((f"e{number}", "evil"), (f"f{number}", f"f{number}")):
            world.join(name, name=own)
            begin(name)
            world.do(core.show, ShownRecord(id=member_id(name), record="A" * LONGEST))
            assert files() <= 8
            world.leave(name, has_finished=True)
            assert files() == 0
    for number in range(30):  # contributions that are refused, and one that is counted
        world.join(f"g{number}")
        begin(f"g{number}")
        refused(world.complete, f"g{number}", 0, norm=float("nan"))
        assert files() <= 8
        world.leave(f"g{number}", has_finished=True)
    world.join("h"), begin("h"), world.complete("h", 0)
    for leave in (lambda: world.leave("h", has_finished=True), lambda: world.drop("h")):
        leave()
        assert refused(world.join, "i").kind == "full", "what it has contributed counts"
        assert files() == 1
    for table in ("parts", "members"):
        assert core.journal.number(f"SELECT COUNT(*) FROM {table}") <= 24
    assert len(status(core)["members"]) <= 4 * 2 + 4
    told = live(core)["members"]
    assert sum(len(each["record"]) for each in told.values()) <= 24 * 2**20
    assert len(told) <= 4 * 2 + 4
    assert world.turn("a", 0) is not None and len(world.answer(0).weights) <= 2


def test_what_all_show_together_is_bounded(tmp_path):
    world = World(tmp_path, max_clusters=200)
    names = [f"n{number}" for number in range(100)]
    for name in names:
        world.join(name)
    record = "A" * LONGEST
    kinds = set()
    for name in names:
        try:
            world.do(world.core.show, ShownRecord(id=member_id(name), record=record))
        except Exception as error:
            kinds.add(getattr(error, "kind", repr(error)))
    assert kinds == {"too_large"}
    assert sum(len(e["record"]) for e in live(world.core)["members"].values()) <= 24 * 2**20


def test_a_name_has_one_contribution_in_a_round_and_keeps_its_cluster(tmp_path):
    world = World(tmp_path, "a", dead_after_s=10.0)
    world.join("e1", name="e")
    world.complete(["e1"], 0)
    for has_finished in (False, True):  # it pauses, and a thief waits; or it has finished
        world.leave("e1", has_finished=has_finished)
        assert refused(world.join, "e2", name="e").kind == "name_taken"
        world.now += 1000.0
        world.heartbeat("a"), world.drop_silent()
        assert refused(world.join, "e2", name="e").kind == "name_taken", "it is counted"
        world.join("e1", name="e")
    world.leave("e1")
    world.do(world.core.part_path, member_id("a"), 0)
    assert world.answer(0).contributed == ["e"] and world.turn("a", 0) == ["a", "e"]
    assert refused(world.join, "e2", name="e", version=1).kind == "name_taken", "it pauses"
    world.restart()
    assert refused(world.join, "e2", name="e", version=1).kind == "name_taken"
    assert world.join("e1", name="e", version=0).standing == "late"
    world.leave("e1")
    world.now += 199.0
    assert refused(world.join, "e2", name="e", version=1).kind == "name_taken"
    world.now += 2.0
    world.heartbeat("a")
    world.join("e2", name="e", version=1)
    assert refused(world.join, "e2", name="z", version=1).kind == "renamed"
    assert refused(world.join, "e3", name="a", version=1).kind == "name_taken"


def test_a_cluster_that_pauses_is_remembered_whoever_comes_and_goes(tmp_path):
    """Others decide rounds until no average of the paused cluster is kept, and come and go."""
    world = World(tmp_path, "ae", max_clusters=4, dead_after_s=10.0)
    world.turns("ae", 0, 1, 2)
    leased = world.lease("a", 1, 1000)
    world.leave("a")
    world.turns("e", *range(3, 13))

    def flood(what: str) -> None:
        for number in range(40):
            world.join(name := f"{what}{number}", version=13, outer_params=after(12))
            world.leave(name, has_finished=True)

    flood("m")
    assert refused(world.join, "z", name="a", version=13).kind == "name_taken"
    assert world.lease("e", 1, 1000) == [(1000, 2000)], "the samples are a's"
    assert world.core.journal.number("SELECT COUNT(*) FROM members") <= 2 + 4 * 4 + 1
    world.leave("e", has_finished=True)
    assert world.core.membership.end_kind() == "alone", "a has not finished"
    back = world.join("a", version=3, outer_params=after(2), holding=leased)
    assert (back.standing, back.lost) == ("behind", [])
    # After its time it is one of many.
    world.join("e", version=13, outer_params=after(12)), world.leave("a")
    world.now += 201.0
    world.heartbeat("e", version=13), world.drop_silent()
    flood("n")
    assert world.join("z", name="a", version=13, outer_params=after(12)).standing == "current"
    assert world.core.journal.number("SELECT COUNT(*) FROM members") <= 2 + 4 * 4 + 1


def test_events_of_one_hide_none_of_others_and_stay_few(tmp_path):
    world = World(tmp_path, "abe")
    world.complete("ab", 0, tokens=1), world.complete("e", 0, tokens=HUGE)
    world.close()
    for name in "ab":
        refused(world.complete, name, 1, norm=float("inf"))
    world.leave("b")  # it pauses
    for _ in range(60):
        refused(world.complete, "e", 1, norm=float("inf"))
    told = events(world.core)
    assert {event["member"] for event in told} >= {"a", "b", "e"} and len(told) <= 50
    # Each refusal is in the log: those of a minute share a row, with their number.
    assert world.events("refused")[-1].endswith("its norm is inf (40 more like this)")

    def come_and_go() -> None:  # under its name and under others
        for number in range(1200):
            world.core.join(joining("e", version=1))
            world.core.join(joining(f"f{number}", version=1))
            world.core.leave(LeaveRun(id=member_id(f"f{number}"), has_finished=True))

    world.do(come_and_go)
    number = world.core.journal.number
    assert number("SELECT COUNT(*) FROM events WHERE member = 'e'") <= 100
    assert number("SELECT COUNT(*) FROM events") <= 2000 + 100
    for name in "ab":
        assert any(text.startswith(f"{name}: round 1") for text in world.events("refused"))
    assert world.events("weight"), "what others see of it stays, too"


def test_events_of_many_names_are_bounded_in_all_and_hide_none(tmp_path):
    world = World(tmp_path, "a", max_clusters=128)
    world.complete("a", 0)
    world.close()
    refused(world.complete, "a", 1, norm=float("inf"))

    def fill() -> None:
        sql = "INSERT INTO events (at, member, kind, what) VALUES (0, ?, ?, 'x')"
        for number in range(60):
            world.core.join(joining(f"e{number}", version=1))
            for kind in ("joined", "left", "refused", "weight", "back"):
                for _ in range(99):
                    world.core.journal.run(sql, f"e{number}", kind)
        world.core.journal.note("e0", "left", "x")

    world.do(fill)
    number = world.core.journal.number
    assert number("SELECT COUNT(*) FROM events") <= 6000
    assert number("SELECT COUNT(*) FROM events WHERE member = 'a'") == 2
    assert number("SELECT COUNT(DISTINCT member) FROM events WHERE kind = 'refused'") == 61


def test_lines_of_the_hub_stay_few_whatever_members_do():
    now = 0.0
    few, written = FewLines(3, Repeats(lambda: now)), list[str]()
    for _ in range(2):
        for number in range(10):
            record = logging.LogRecord("hub", logging.ERROR, "a.py", 7, "no %d", (number,), None)
            other = logging.LogRecord("hub", logging.ERROR, "a.py", 9, "other", (), None)
            written += [r.getMessage() for r in (record, other) if few.filter(r)]
        now += 61.0
    dropped = "(isles drops similar lines in this minute)"
    once = ["no 0", "other", "no 1", "other", f"no 2 {dropped}", f"other {dropped}"]
    assert written == 2 * once


def test_averages_are_pinned_for_one_that_pulls_but_not_for_ever(tmp_path):
    world = World(tmp_path, "a", dead_after_s=1e6)
    world.join("n", outer_params="1" * 64)
    world.want_state("n")
    world.core.states.complete(world.offer_state("a", 0, ZERO))
    kept = []
    for outer_step in range(140):
        world.turns("a", outer_step)
        world.want_state("n")
        kept.append(world.core.rounds.next - world.core.rounds.kept_since)
    assert max(kept) == 128 and kept[-1] == 8


def test_the_memory_stays_as_small_as_it_is(tmp_path):
    world = World(tmp_path, "ab", keep_averages=2)
    for outer_step in range(60):
        for name in "ab":
            spans = world.lease(name, outer_step + 1, 4)
            world.complete(name, outer_step, spans)
        world.close()
        for name in "ab":
            world.applied(name, outer_step, after(outer_step))
    number = world.core.journal.number
    assert number("SELECT COUNT(*) FROM rounds") <= 22
    assert number("SELECT COUNT(*) FROM parts") <= 2 * 33
    assert number("SELECT COUNT(*) FROM blocks") == 1
    assert number("SELECT COUNT(*) FROM applied") <= 2 * 3

"""Rounds that are closed by time, against members that hurry or dawdle to be alone."""

from __future__ import annotations

from isles.outer.hub.rules import Refusal
from tests.outer_world import World, after


def _turns_of(world: World, names: str, outer_step: int, seconds: float) -> None:
    """These train for so long, contribute to a round, and apply its average."""
    world.now += seconds
    world.complete(names, outer_step)
    assert world.close() == sorted(names)
    for name in names:
        world.applied(name, outer_step, after(outer_step))


def _closed(world: World) -> list[str]:
    found = []
    while (who := world.close()) is not None:
        found.append("".join(who))
    return found


def test_contributions_sent_ahead_take_nobodys_time_away(tmp_path):
    """Rounds take 600 s, time boxes 30 s; one of three, or two of four, send eight rounds ahead."""
    rules = {"time_boxed": {"time_box_s": 30.0}, "quorum": {"quorum": 2, "grace_s": 30.0}}
    found = {}
    for liars in ("e", "ef"):
        for wait, more in rules.items():
            folder = tmp_path / f"{liars}-{wait}"
            folder.mkdir()
            world = World(folder, f"ab{liars}", wait=wait, dead_after_s=1e4, **more)
            for outer_step in range(4):
                _turns_of(world, f"ab{liars}", outer_step, 600.0)
            alone = []
            for outer_step in range(4, 16):
                for ahead in range(outer_step, outer_step + 8):
                    world.complete(liars, ahead)
                for seconds in (40.0, 550.0):
                    world.now += seconds
                    for name in "ab":
                        world.heartbeat(name, step=int(world.now), version=outer_step)
                    alone += _closed(world)
                world.now += 10.0
                if world.core.rounds.next == outer_step:
                    world.complete("ab", outer_step)
                alone += [who for who in _closed(world) if who != f"ab{liars}"]
            if alone or world.core.rounds.next != 16:
                found[liars, wait] = alone, world.core.rounds.next
    assert found == {}


def test_late_clusters_are_not_waited_for_longer_than_a_box_after_most_have_come(tmp_path):
    world = World(tmp_path, "abe", wait="time_boxed", time_box_s=30.0, dead_after_s=1e4)
    for outer_step in range(4):
        world.now += 60.0
        world.complete("ab", outer_step)
        world.now += 29.0  # e uses up each box, so that it is waited for longer and longer
        world.complete("e", outer_step)
        assert world.close() == ["a", "b", "e"]
    world.now += 60.0
    world.complete("ab", 4)
    world.now += 29.0
    assert world.close() is None
    assert world.answer(4).due_in_s == 1.0 and world.answer(5).due_in_s is None
    world.now += 1.0
    assert world.close() == ["a", "b"]


def test_half_that_come_late_do_not_make_rounds_longer_and_longer(tmp_path):
    """a and b need 10 s, e and f come a moment before the box of 60 s ends; later as others."""
    world = World(tmp_path, "abef", wait="time_boxed", time_box_s=60.0, dead_after_s=1e9)
    late, lengths = ["e", "f"], []
    for outer_step in range(60):
        began = world.now
        world.now += 10.0
        world.complete("ab", outer_step)
        due_in_s = world.answer(outer_step).due_in_s
        assert due_in_s is not None
        world.now += due_in_s - 1.0
        world.complete(late, outer_step)
        assert sorted(world.close() or []) == sorted(["a", "b", *late])
        lengths.append(world.now - began)
        if outer_step in (20, 30, 40, 50):
            world.leave(gone := late.pop(0))
            late.append(gone + "0")
            world.join(late[-1], version=outer_step + 1)
    first_s = 10.0 + 60.0
    assert max(lengths) <= 2 * (first_s + 60.0) + 60.0, lengths


def test_who_is_alone_among_living_clusters_is_shown(tmp_path):
    world = World(tmp_path, "abe", wait="time_boxed", time_box_s=30.0, dead_after_s=1e4)
    world.turns("abe", 0)
    world.now += 1.0
    world.complete("e", 1)
    world.now += 30.0
    assert world.close() == ["e"]
    assert any("e: " in event and "100.0%" in event for event in world.events("weight"))
    world.complete("abe", 2)
    world.close()
    assert world.core.rounds.heaviest(2, {"a": 10, "b": 10, "e": 10}) is None


def test_one_that_was_alone_for_long_does_not_say_what_is_usual(tmp_path):
    world = World(tmp_path, "abe", wait="time_boxed", time_box_s=30.0, dead_after_s=1e4)
    world.turns("abe", *range(8))
    for outer_step in range(8, 28):
        world.complete("e", outer_step, norm=9.0)
        world.now += 31.0
        assert world.close() == ["e"]
    world.complete("abe", 28, norm=1.0)
    world.close()
    world.complete("ab", 29, norm=1.0)
    world.complete("e", 29, norm=20.0)
    world.close()
    assert world.answer(29).refused.keys() == {"e"}


def test_a_state_source_that_trickles_is_passed_and_asked_last(tmp_path):
    """It sends a little within each `source_s`, of ever another state."""
    world = World(tmp_path, "ea", keep_averages=2, source_s=60.0, dead_after_s=1e4)
    world.turns("ae", *range(4))
    assert world.join("n").standing == "behind"
    world.heartbeat("e", version=4)
    assert world.want_state("n").source == "e"
    for minute in range(5):
        world.now += 50.0
        try:
            world.offer_state("e", 4, after(3), size_bytes=10 + minute)
        except Refusal:
            break
        number = world.number("e")
        world.do(lambda number=number: world.core.states.note_progress(number, 11))
        source = world.want_state("n").source
    assert source == "a" and world.now <= 200.0
    world.now += 61.0  # a sends nothing either; it has failed as often as e
    assert world.want_state("n").source == "e"
    world.now += 61.0
    assert world.want_state("n").source == "a"
    number = world.offer_state("a", 4, after(3))
    for _ in range(20):  # a link of 2 Mbit/s; the state may be 4 MiB long
        world.now += 4.0
        a = world.number("a")
        world.do(lambda a=a: world.core.states.note_progress(a, 2**20))
        assert world.want_state("n").source == "a"
    world.core.states.complete(number)
    assert world.want_state("n").state == number

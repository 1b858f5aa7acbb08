"""What the hub believes of its members: weights, norms, names, reports, events, the end."""

from __future__ import annotations

import pytest

from isles.outer.hub.core import events, status
from isles.outer.hub.rules import counted_tokens, heavy
from tests.outer_world import ZERO, World, after, refused

HUGE = 2**61


def test_two_liars_of_seven_move_an_average_five_times_at_once_and_ten_times_ever(tmp_path):
    # How large an average is, in times the usual: for each claim of tokens and each norm.
    at_once, later, told = 0.0, 0.0, ""
    for trial, norm in enumerate((9.9, 30.0, 99.0)):
        for tokens in (100, HUGE):
            (folder := tmp_path / f"{trial}-{tokens}").mkdir()
            world = World(folder, "abcdgef")
            for outer_step in range(2):
                world.complete("abcdgef", outer_step, tokens=100, norm=0.01), world.close()
            norms = dict.fromkeys("abcdg", 1.0) | dict.fromkeys("ef", norm)
            for outer_step in range(2, 12):  # patient ones gather weight with usual norms first
                is_last = outer_step in (2, 11)
                world.complete("abcdg", outer_step, tokens=100, norm=0.01)
                world.complete(
                    "ef", outer_step, tokens=tokens, norm=0.01 * (norm if is_last else 1)
                )
                world.close()
                weights = world.answer(outer_step).weights
                pull = sum(weights[n] * norms[n] for n in weights) / sum(weights.values())
                if outer_step == 2:
                    at_once = max(at_once, pull)
                    told += " ".join(world.events("weight"))
                if is_last:
                    later = max(later, pull)
            world.core.journal.close()
    assert 4.0 < at_once <= 5.0 and 5.0 < later <= 10.0, (at_once, later)
    assert "count (its norm is large)" in told


def test_an_honest_cluster_of_ten_times_the_size_has_its_weight(tmp_path):
    # At once with a usual norm; in some rounds with a norm that is several times as large.
    for times, rounds in ((1.0, 1), (3.0, 7), (5.0, 13)):
        (folder := tmp_path / f"{times}").mkdir()
        world = World(folder, "abcdl")
        for outer_step in range(rounds):
            world.complete("abcd", outer_step, tokens=100)
            world.complete("l", outer_step, tokens=1000, norm=times)
            assert world.close() == list("abcdl")
        assert world.answer(rounds - 1).weights["l"] == 1000, times


def test_a_large_cluster_comes_to_its_weight_in_some_rounds_and_a_liar_no_further(tmp_path):
    world = World(tmp_path, "abc")
    counted = []
    for outer_step in range(12):
        world.complete("ab", outer_step, tokens=100)
        world.complete("c", outer_step, tokens=10_000 if outer_step < 6 else HUGE)
        world.close()
        counted.append(world.answer(outer_step).weights["c"])
    assert counted[:6] == [1000, 1000, 1000, 10_000, 10_000, 10_000]
    assert max(counted) == 100_000 == counted[-1], "a thousand times the others' at most"
    # One liar is no measure for another.
    assert counted_tokens({1: 100, 2: HUGE, 3: HUGE}, [], 10.0) == {1: 100, 2: 1000, 3: 1000}


def test_the_fewest_that_outweigh_all_others_together_are_named(tmp_path):
    assert heavy({"a": 1, "b": 1, "e": 30, "f": 30}) == (["e", "f"], pytest.approx(60 / 62))
    assert heavy({"a": 1, "e": 30, "f": 30}) is None, "most of the clusters"
    assert heavy({"a": 0}) is None is heavy({})
    world = World(tmp_path, "abef")
    world.complete("ab", 0, tokens=1), world.complete("ef", 0, tokens=HUGE)
    world.close()
    assert status(world.core)["heavy"] is not None
    assert any("e, f are together 90" in text for text in world.events("weight"))


def test_who_is_alone_in_a_round_does_not_say_what_is_usual(tmp_path):
    for wait, rules in (("all", {}), ("time_boxed", {"time_box_s": 2.0})):
        (tmp_path / wait).mkdir()
        world = World(tmp_path / wait, "abe", wait=wait, **rules)
        world.turns("abe", 0, 1, 2, 3)
        if wait == "all":
            world.leave("a"), world.leave("b")
        world.complete("e", 4, norm=1e30)
        world.now += 2.0
        assert world.close() == [], wait
        assert "times the usual norm" in world.answer(4).refused["e"]
    # What two of three do is common, as after a restart of the learning rate.
    (tmp_path / "two").mkdir()
    world = World(tmp_path / "two", "abe", wait="time_boxed", time_box_s=2.0)
    world.turns("abe", 0, 1, 2, 3)
    world.complete("ab", 4, norm=50.0)
    world.now += 2.0
    assert world.close() == ["a", "b"]


def test_tiny_norms_of_half_of_the_clusters_make_no_other_an_outlier(tmp_path):
    """Honest norms are 1: a, b; those of e, f are tiny, and they have begun earlier."""
    for early, honest, evil in (("e", "a", "e"), ("ef", "ab", "ef"), ("e", "ab", "ef")):
        (folder := tmp_path / f"{early}-{honest}").mkdir()
        world = World(folder, early)
        world.complete(early, 0, norm=1e-6), world.close()
        for name in {*honest, *evil} - {*early}:
            world.join(name, version=1, outer_params=ZERO)
        for outer_step in range(1, 30):
            world.complete(honest, outer_step, tokens=1000)
            world.complete(evil, outer_step, norm=1e-6)
            assert world.close() == sorted(honest + evil), (early, honest, outer_step)
        world.core.journal.close()


def test_most_of_the_clusters_say_what_is_usual_whoever_came_first(tmp_path):
    world = World(tmp_path, "e")
    for outer_step in range(8):
        world.complete("e", outer_step, norm=1e-6), world.close()
    for name in "abf":
        world.join(name, version=8, outer_params=ZERO)
    world.join("c", version=8, outer_params=ZERO)
    world.complete("abc", 8), world.complete("e", 8, norm=1e-6), world.complete("f", 8, norm=1e30)
    assert world.close() == list("abce"), "who is far above even these is refused"
    world.complete("abc", 9), world.complete("e", 9, norm=1e-6), world.complete("f", 9, norm=1e3)
    assert world.close() == list("abce")


def test_one_that_comes_under_new_names_is_not_many(tmp_path):
    world = World(tmp_path, "abc")
    for outer_step in range(20):
        world.join(own := f"e{outer_step}", version=outer_step, outer_params=ZERO)
        world.complete("abc", outer_step), world.complete([own], outer_step, norm=9.0)
        assert len(world.close()) == 4
        world.leave(own)
    world.join("f", version=20, outer_params=ZERO)
    world.complete("abc", 20), world.complete("f", 20, norm=80.0)
    assert world.close() == list("abc")


def test_a_cluster_that_has_always_been_alone_may_change_its_rate(tmp_path):
    world = World(tmp_path, "a")
    world.turns("a", 0, 1, 2, 3, 4)
    world.complete("a", 5, norm=500.0)
    assert world.close() == ["a"] and world.answer(5).weights == {"a": 10}


def test_what_was_contributed_before_a_silence_counts(tmp_path):
    world = World(tmp_path, "ab", max_clusters=2)
    samples = world.lease("a", 1, 100)
    world.complete("a", 0, samples)
    world.drop("a")
    assert refused(world.join, "e", name="a").kind == "name_taken"
    assert refused(world.join, "e").kind == "full"
    assert world.turn("b", 0) == ["a", "b"]
    assert world.heartbeat("a").command == "" and world.events("back")
    assert world.core.samples.counts() == {"averaged": 100}


def test_the_first_reports_throw_nobody_back(tmp_path):
    world = World(tmp_path, "eab")
    world.turn("eab", 0)
    world.applied("e", 0, "e" * 64), world.applied("a", 0, after(0))
    world.heartbeat("b", version=1)
    assert world.heartbeat("a", version=1).command == ""
    world.applied("b", 0, after(0))
    assert [world.heartbeat(name, version=1).command for name in "eab"] == ["pull", "", ""]


def test_of_two_that_differ_who_joined_first_is_right_until_most_say_otherwise(tmp_path):
    world = World(tmp_path, "abc", wait="time_boxed", time_box_s=1.0)
    world.complete("ab", 0)
    world.now += 1.0
    world.close()
    world.applied("a", 0, "a" * 64), world.applied("b", 0, "b" * 64)
    assert world.heartbeat("b").command == "pull", "both that had a part are heard"
    assert world.join("b", version=1, outer_params="b" * 64).standing == "behind"
    world.applied("c", 0, "b" * 64)
    assert world.heartbeat("a").command == "pull" and world.heartbeat("b").command == ""
    assert world.turn("bc", 1) == ["b", "c"]


def test_one_cluster_does_not_make_all_wait_for_long(tmp_path):
    world = World(tmp_path, "ae")
    world.heartbeat("a", sync_every=50), world.heartbeat("e", sync_every=100_000)
    assert world.heartbeat("a", sync_every=50).sync_every == 1000


def test_what_was_refused_is_seen_whoever_comes_and_goes(tmp_path):
    world = World(tmp_path, "a", max_clusters=300)
    refused(world.complete, "a", 0, norm=float("nan"))
    for number in range(60):
        world.join(f"e{number}")
    for _ in range(300):
        for name in ("e1", "e2"):
            world.join(name)
    told = events(world.core)
    assert len(told) == 50 and ("a", "refused") in {(e["member"], e["kind"]) for e in told}
    assert [e["number"] for e in told] == sorted(e["number"] for e in told)


def test_a_stranger_to_the_run_does_not_end_it(tmp_path):
    world = World(tmp_path, "e", min_clusters=2)
    world.leave("e", has_finished=True)
    assert world.core.membership.end_kind() == "alone"
    world.join("a"), world.join("b")
    world.turn("ab", 0)
    world.leave("a", has_finished=True), world.leave("b", has_finished=True)
    assert world.core.membership.end_kind() == "over"


def test_a_cut_below_one_percent_is_no_event(tmp_path):
    world = World(tmp_path, "abe")
    for outer_step, claimed in enumerate((100, 100, 1004, 1200)):
        world.complete("ab", outer_step, tokens=100)
        world.complete("e", outer_step, tokens=claimed)
        world.close()
    assert world.answer(2).weights["e"] == world.answer(3).weights["e"] == 1000
    (told,) = world.events("weight")
    assert told.startswith("e: round 3: 1000 of the 1200 tokens that it claims count")


def test_a_stranger_that_finishes_lowers_no_number_of_contributions(tmp_path):
    world = World(tmp_path, "ab", min_clusters=3)
    world.join("e"), world.leave("e", has_finished=True)
    assert world.turn("ab", 0) is None
    world.join("c")
    assert world.turn("c", 0) == ["a", "b", "c"]
    world.leave("c", has_finished=True)
    for outer_step in range(1, 50):  # however long it is since it took part
        assert world.turn("ab", outer_step) == ["a", "b"]

"""What the hub does not let clusters do, when it ends, and what it says of itself."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from isles.errors import ConfigError, UserError
from isles.outer.hub.core import HubCore, live, status
from isles.outer.hub.journal import JOURNAL, Journal
from isles.outer.hub.work import AwakeClock
from isles.outer.messages import ShownRecord
from isles.run.relay import LONGEST
from isles.train.loop import finish_together
from isles.train.progress import Progress
from tests.outer_world import ZERO, World, after, joining, member_id, refused

RUN = {"layout": "a", "outer.lr": "0.7", "steps of the run": "100"}


def test_what_differs_is_named_with_both_values_and_changed_only_by_all(tmp_path):
    world = World(tmp_path)
    world.join("a", identity=RUN), world.join("b", identity=RUN)
    longer = {**RUN, "steps of the run": "200", "outer.lr": "0.5"}
    for name in "cb":  # also one that has been in
        what = refused(world.join, name, identity=longer).what
        assert f"outer.lr is 0.5 in {name}, but 0.7 in the run" in what
        assert f"steps of the run is 200 in {name}, but 100 in the run" in what
    # All stop, and the run goes on with other settings: they hold for everyone who comes then.
    world.now += 11.0
    world.drop_silent()
    what = refused(world.join, "a", identity=longer).what
    assert "outer.lr is 0.5 in a" in what, "b is cut off for a moment, and will be back"
    world.now += 300.0
    world.drop_silent()
    world.join("a", identity=longer)
    assert "outer.lr 0.7 -> 0.5" in world.events("settings")[0]
    # b was away: it must join, and is compared.
    assert "does not know this cluster" in refused(world.heartbeat, "b").what
    what = refused(world.join, "b", identity=RUN).what
    assert "outer.lr is 0.7 in b, but 0.5 in the run" in what
    assert world.join("b", identity=longer).standing == "current"
    # What the weights rest on never changes.
    world.leave("a"), world.leave("b")
    what = refused(world.join, "a", identity={**longer, "layout": "z"}).what
    assert "layout is z in a, but a in the run" in what


def test_who_pauses_comes_back_to_the_settings_of_before(tmp_path):
    run = {**RUN, "training.seed": "0", "data.x": "a", "data.seq_length": "16"}
    other = {**run, "training.seed": "1", "data.x": "e", "data.seq_length": "999999999999"}
    for stops in ("pauses", "is silent"):
        (tmp_path / stops).mkdir()
        world = World(tmp_path / stops, dead_after_s=10.0)
        world.join("a", identity=run)
        world.turns("a", 0)
        if stops == "pauses":
            world.leave("a")
        for seconds, restarts in ((0.0, False), (199.0, False), (0.0, True), (199.0, False)):
            world.now += seconds
            world.drop_silent()
            if restarts:
                world.restart()
            for version, weights in ((0, ZERO), (1, after(0))):
                asked = {"identity": other, "version": version, "outer_params": weights}
                refusal = refused(world.join, "e", **asked)
                assert refusal.kind == "other_run" and "data.x is e in e" in refusal.what
            assert "wait 200 s" in refusal.fix
        known = {"version": 1, "outer_params": after(0)}
        assert world.join("a", identity=run, **known).standing == "current"
        # Alone it may change them at once, as may others when it has finished.
        world.leave("a")
        assert world.join("a", identity=other, **known).standing == "current"
        world.leave("a", has_finished=True)
        assert world.join("b", identity=run, **known).standing == "current"
        world.core.journal.close()


def test_without_a_hub_who_comes_first_after_a_stop_of_all_sets_new_values(tmp_path):
    """Its process is new: it cannot know for how long the others have been stopped."""
    world = World(tmp_path)
    world.join("a", identity=RUN), world.join("b", identity=RUN)
    world.turns("ab", 0)
    longer = {**RUN, "steps of the run": "200"}
    known = {"version": 1, "outer_params": after(0), "identity": longer}
    for leaves, kind in (("a", "other_run"), ("b", "")):
        world.leave(leaves)
        world.core.journal.close()
        journal = Journal(tmp_path / JOURNAL)
        world.core = HubCore(tmp_path, world.settings, lambda: world.now, journal)
        if kind:
            assert refused(world.join, "a", **known).kind == kind
    assert world.join("a", **known).standing == "current"
    assert refused(world.join, "b", **{**known, "identity": RUN}).kind == "other_run"


def test_a_join_that_is_none_is_not_taken():
    joining("a")
    for change in (
        {"name": "../x"},
        {"id": "A" * 32},
        {"identity": {"k": "v" * 300}},
        {"identity": {f"{n}": "v" for n in range(65)}},
        {"pieces": [[2**40]]},
        {"version": 2**62},
        {"outer_params": ["0" * 63]},
        {"more": 1},
    ):
        with pytest.raises(ValidationError):
            joining("a", **change)


def test_a_cluster_that_never_ends_its_pull_does_not_fill_the_disk(tmp_path):
    world = World(tmp_path, "a", keep_averages=2, dead_after_s=1e6)
    world.join("n", outer_params="1" * 64)
    world.want_state("n")
    world.core.states.complete(world.offer_state("a", 0, ZERO))
    kept = []
    for outer_step in range(40):
        world.turns("a", outer_step)
        world.want_state("n")
        kept.append(world.core.rounds.next - world.core.rounds.kept_since)
    # The state is too old by now: there will be another.
    assert max(kept) == 2 * 16 and kept[-1] == 2


def test_a_damaged_memory_is_named(tmp_path):
    world = World(tmp_path, "a")
    world.lease("a", 1, 5)
    world.core.journal.close()
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    (tmp_path / f"{JOURNAL}-wal").unlink(missing_ok=True)
    for broken in (b"no database at all" * 1000, whole[:4096] + b"\xff" * (len(whole) - 4096)):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match="damaged") as caught:
            Journal(path)
        assert str(path) in str(caught.value) and "move the file away" in caught.value.fix
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE members (x)")
    with pytest.raises(ConfigError, match="another version of isles"):
        Journal(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="cannot open the hub's memory"):
        Journal(path)


def test_a_hub_that_stood_still_blames_nobody():
    now = [100.0]
    clock = AwakeClock(lambda: now[0])
    for seconds in (0.5, 60.0, 0.5):  # SIGSTOP, or a machine that slept
        now[0] += seconds
        clock.tick()
    assert clock.now() == 2.0


def test_it_is_over_when_all_have_finished_and_alone_when_the_rest_is_not_heard(tmp_path):
    world = World(tmp_path, "e", min_clusters=2)
    world.leave("e", has_finished=True)
    assert world.core.membership.end_kind() == "alone", "it ends nothing at once"
    world.join("a"), world.join("b")
    world.turn("ab", 0)
    for happens, kind in (
        (lambda: world.leave("b"), ""),  # stopped: it comes back
        (lambda: world.leave("a", has_finished=True), "alone"),
        (lambda: world.join("b"), ""),
        (lambda: world.leave("b", has_finished=True), "over"),
        (world.restart, "over"),
        (lambda: world.join("a"), ""),
    ):
        happens()
        assert world.core.membership.end_kind() == kind


def test_a_finished_run_is_not_given_to_a_new_cluster(tmp_path):
    world = World(tmp_path, "ab")
    world.turn("ab", 0)
    world.leave("a", has_finished=True)
    world.join("c"), world.leave("c", has_finished=True)  # b still trains
    world.leave("b", has_finished=True)
    for settings in ({}, {"identity": {"layout": "a", "outer.lr": "1"}}, {"name": "a"}):
        refusal = refused(world.join, "d", **settings)
        assert refusal.kind == "over" and "finished this run (a, b)" in refusal.what
        keys = re.findall(r"name(?==)|outer\.url|training\.max_steps", refusal.fix)
        assert keys == ["name", "outer.url", "training.max_steps"]
    # The fix, followed: another place, and then more steps of the clusters of this run.
    (tmp_path / "other").mkdir()
    World(tmp_path / "other").join("d")
    world.restart()
    assert refused(world.join, "d").kind == "over"
    longer = {"layout": "a", "steps of the run": "700"}
    world.join("a", version=1, identity=longer)
    world.join("d", identity=longer)  # a trains again


def test_a_new_cluster_joins_if_another_may_come_back(tmp_path):
    for way in ("pauses", "left"):
        (tmp_path / way).mkdir()
        world = World(tmp_path / way, "ab")
        world.turn("ab", 0)
        world.leave("a", has_finished=True)
        if way == "left":
            world.leave("b")
        else:
            world.now += 1e4
            world.core.membership.drop_silent()
        assert world.core.membership.end_kind() == "alone"
        world.join("c")


def test_a_cluster_that_trained_no_step_says_so():
    progress, notes = Progress.fresh(), list[str]()
    recorder = SimpleNamespace(note=notes.append)
    parts: Any = SimpleNamespace(progress=progress, total_steps=9, outer=None, recorder=recorder)
    assert finish_together(parts) == 0 and not notes
    progress.skip_to(9)  # by averages, because it joined at the end
    assert finish_together(parts) == 0
    assert "none of the 9 steps" in notes[0]


def test_a_cluster_that_went_without_a_word_stays_dropped_for_people(tmp_path):
    world = World(tmp_path, "ab", dead_after_s=10.0)

    def shown() -> dict[str, str]:
        return {each["name"]: each["state"] for each in status(world.core)["members"]}

    world.drop("b")
    assert shown() == {"a": "living", "b": "dropped"}
    world.drop("b", for_long=True)
    assert shown()["b"] == "dropped" and not world.core.membership.has(member_id("b"))
    world.join("b")
    world.leave("b")
    assert shown()["b"] == "left", "it pauses, and has said so"


def test_all_end_together_when_nothing_is_left_of_any(tmp_path):
    world = World(tmp_path, "abc", min_clusters=2, dead_after_s=10.0)
    assert world.end("a") is None
    assert world.turn("bc", 0) == ["b", "c"], "a has nothing to contribute"
    assert world.end("b") is None
    assert world.turn("c", 1) == ["c"], "it alone has something left"
    world.complete("c", 2)
    assert world.end("c") is None, "what it has contributed is not decided yet"
    assert world.close() == ["c"]
    world.join("d", version=3)
    assert world.end("c") is None
    world.leave("d")  # stopped: it may come back in a week
    world.restart()
    assert [world.end(name) for name in "cab"] == [3, 3, 3]
    world.join("d", version=3)
    world.turn("d", 3)
    assert world.end("a") == 3, "others may have ended with these already"
    world.join("a", version=4)
    assert world.end("a") is None, "it goes on, and ends with d"
    assert world.end("d") == 4 == world.end("a")


def test_the_end_waits_for_who_may_come_back_with_steps_of_its_own(tmp_path):
    world = World(tmp_path, "ab", dead_after_s=10.0)
    world.now = 11.0
    assert world.end("a") is None
    world.drop_silent()
    assert world.events("dropped") and world.end("a") is None, "b is started again, say"
    world.join("b")
    world.turn("b", 0)
    world.applied("b", 0, "b" * 64)
    assert world.end("a") is None and world.end("b") == 1
    world.join("b", version=1, outer_params="b" * 64)
    assert world.end("a") == 1
    world.join("a", version=1, outer_params="c" * 64)
    assert world.end("a") is None is world.end("b"), "a pulls the state first, from b"
    ends = []
    while not any(ends):
        world.now += 9.0
        ends.append(world.end("b"))
        world.drop_silent()
    assert ends[-1] == 1 and 20 < len(ends) < 25, "a has gone for good"


def test_status_says_who_is_waited_for_and_why(tmp_path):
    world = World(tmp_path, "abc", dead_after_s=100.0)
    for name in "abc":
        world.heartbeat(name, step=1)
    world.complete("a", 0, tokens=30), world.complete("b", 0, tokens=10)
    world.now += 3.0
    refused(world.complete, "c", 0, norm=float("nan"))
    world.close()
    world.complete("a", 1)
    world.now += 20.0
    world.heartbeat("b", step=2)
    told = status(world.core)
    a, b, c = told["members"]
    assert (a["weight"], b["weight"], c["weight"]) == (0.75, 0.25, 0.0)
    assert c["refused"].startswith("round 0: ") and a["slow"] == ""
    assert b["slow"] == "training: 0 inner steps since its last round"
    assert c["slow"] == "no heartbeat for 20s"
    (opened,), (commit,) = told["open"], told["commits"]
    assert (opened["round"], opened["since_s"]) == (1, 20.0)
    assert opened["missing"] == {"b": b["slow"], "c": c["slow"]}
    assert commit["seconds"] == 3.0
    assert commit["weights"] == {"a": 30, "b": 10} and list(commit["refused"]) == ["c"]


def test_the_hub_keeps_the_newest_that_each_cluster_shows(tmp_path):
    world = World(tmp_path, "ab")

    def show(name, record):
        world.do(world.core.show, ShownRecord(id=member_id(name), record=record))

    show("a", "b2xk"), show("b", "Yg==")
    world.now += 3.0
    show("a", "bmV3")
    assert live(world.core)["members"] == {
        "a": {"heard_s": 0.0, "record": "bmV3"},
        "b": {"heard_s": 3.0, "record": "Yg=="},
    }
    world.now += 300.0
    show("a", "bmV3")
    world.drop_silent()
    assert status(world.core)["members"][0]["state"] != "living", "it is no sign of life"
    world.join("c")  # others come, b's name is taken anew: nothing of the old ones is kept
    world.leave("b")
    world.join("b2", name="b")
    show("c", "Yw==")
    assert set(live(world.core)["members"]) == {"a", "c"}
    assert "does not know this cluster" in refused(show, "nobody", "Yg==").what
    for record in ("x" * (LONGEST + 1), "\n", '{"a": 1}'):
        with pytest.raises(ValidationError):
            ShownRecord(id=member_id("a"), record=record)

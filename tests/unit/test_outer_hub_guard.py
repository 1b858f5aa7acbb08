"""What the hub does not let clusters do, and what it says of itself."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from pydantic import ValidationError

from isles.errors import ConfigError, UserError
from isles.outer.hub.journal import JOURNAL, Journal
from isles.outer.hub.rules import Refusal, outliers
from isles.outer.hub.status import status
from isles.outer.messages import (
    SAMPLE_TOKENS,
    Join,
    StateFile,
    StateOffer,
)
from isles.outer.samples import reserve_of
from tests.each import each
from tests.outer_world import ZERO, World, member_id, overlaps

RUN = {"layout": "a", "outer.lr": "0.7", "steps of the run": "100"}


# What must be equal.


def test_what_differs_is_named_with_both_values_and_changed_only_by_all(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a", identity=RUN), world.join("b", identity=RUN)
    longer = {**RUN, "steps of the run": "200", "outer.lr": "0.5"}
    with pytest.raises(Refusal) as caught:
        world.join("c", identity=longer)
    assert "outer.lr is 0.5 in c and 0.7 in the run" in caught.value.what
    assert "steps of the run is 200 in c and 100 in the run" in caught.value.what
    with pytest.raises(Refusal):  # also one that has been in
        world.join("b", identity=longer)
    # All stop, and the run goes on with other settings: they hold for everyone who comes then.
    world.now += 11.0
    world.core.drop_silent()
    world.join("a", identity=longer)
    assert "outer.lr 0.7 -> 0.5" in world.events("settings")[0]
    with pytest.raises(Refusal, match="does not know this cluster"):
        world.heartbeat("b")  # it was away: it must join, and is compared
    with pytest.raises(Refusal, match=r"outer\.lr is 0\.7 in b and 0\.5 in the run"):
        world.join("b", identity=RUN)
    assert world.join("b", identity=longer).standing == "current"
    # What the weights rest on never changes.
    world.core.leave(member_id("a")), world.core.leave(member_id("b"))
    with pytest.raises(Refusal, match="layout is z in a and a in the run"):
        world.join("a", identity={**longer, "layout": "z"})


@each(
    "change",
    [
        {"protocol": 10**5000},
        {"protocol": "2"},
        {"name": "a\n"},
        {"name": "../x"},
        {"id": "A" * 32},
        {"identity": {"k" * 300: "v"}},
        {"identity": {"k": "v" * 300}},
        {"identity": {f"{n}": "v" for n in range(65)}},
        {"pieces": [[2**40]]},
        {"pieces": [[0]]},
        {"pieces": [[True]]},
        {"version": -1},
        {"version": 2**62},
        {"outer_params": ["0" * 63]},
        {"holding": [[3]]},
        {"more": 1},
    ],
)
def test_a_join_that_is_none_is_not_taken(change: dict) -> None:
    body = {"id": member_id("a"), "name": "a", "identity": RUN, "codec": "none"}
    body |= {"pieces": [[4]], "version": 0, "outer_params": [ZERO]}
    Join.model_validate(body)
    with pytest.raises(ValidationError):
        Join.model_validate({**body, **change}, strict=True)


# How much a contribution may weigh.


def test_a_contribution_weighs_no_more_than_its_samples(tmp_path: Path) -> None:
    world = World(tmp_path, fragments=2)
    identity = {**RUN, SAMPLE_TOKENS: "8"}
    for name in "ab":
        world.join(name, identity=identity)
    a, b = world.lease("a", 1, 4), world.lease("b", 1, 4)
    world.complete("b", 0, [*b, *a], tokens=10**18)  # half of them are a's
    world.complete("a", 0, a, tokens=30)
    assert world.close() == ["a", "b"]
    assert world.core.answer(0).weights == {"a": 30, "b": 32}
    assert "b: round 0: it claims 1000000000000000000 tokens" in world.events("weight")[0]
    # Samples count for each fragment, but once each.
    world.complete("b", 1, b, tokens=10**18), world.complete("a", 1, [], tokens=32)
    world.close()
    assert world.core.answer(1).weights == {"a": 32, "b": 32}
    world.complete("a", 2, [], tokens=32), world.complete("b", 2, [], tokens=32)
    world.close()
    assert world.core.answer(2).weights == {"a": 1, "b": 1}
    # What was read while no samples were dealt counts as well, if it is the cluster's own.
    start, _ = reserve_of(member_id("a"))
    world.complete("a", 3, [(start, start + 2)], tokens=16)
    with pytest.raises(Refusal, match="never been dealt"):
        foreign, _ = reserve_of("ff" * 16)
        world.complete("b", 3, [(foreign, foreign + 2)], tokens=16)
    world.complete("b", 3, [], tokens=1)
    world.close()
    assert world.core.answer(3).weights == {"a": 16, "b": 1}
    assert overlaps(world.core.journal) == []
    with pytest.raises(Refusal, match="never been dealt"):
        world.complete("b", 4, [(2**60, 2**60 + 1)])


def test_nobody_claims_more_samples_than_a_turn_needs(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a")
    world.lease("a", 1, 2**27)
    with pytest.raises(Refusal, match="are allowed"):
        world.lease("a", 2, 1)


def test_at_first_a_contribution_is_compared_with_those_of_others() -> None:
    assert list(outliers(10.0, [], {1: (1.0, 9), 2: (1e30, 9), 3: (2.0, 9)})) == [2]
    assert outliers(10.0, [], {1: (1.0, 9), 2: (1e30, 9)}) == {}  # who of two is wrong?
    assert outliers(10.0, [], {1: (0.0, 9), 2: (1.0, 9), 3: (0.0, 9)}) == {}


# Members that speak for others, and fill the disk.


def test_a_state_is_taken_of_whom_it_is_asked_and_as_large_as_it_is(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a")

    def offer(size_bytes: int, files: int = 1) -> int:
        each = [
            StateFile(name=f"f{n}.safetensors", size_bytes=size_bytes, digest=ZERO)
            for n in range(files)
        ]
        return world.core.offer_state(
            StateOffer(id=member_id("a"), version=0, outer_params=[ZERO], files=each)
        )

    with pytest.raises(Refusal, match="no state is asked"):
        offer(100)
    world.join("n", outer_params="1" * 64)
    world.core.want_state(member_id("n"))
    for size_bytes, files in ((2**40, 1), (10, 2)):
        with pytest.raises(Refusal, match=r"one of this run has"):
            offer(size_bytes, files)
    first = offer(100)
    second = offer(101)  # another one: the first, which never came, is forgotten
    assert second != first or world.core.states.files(second).files[0].size_bytes == 101
    assert world.core.journal.number("SELECT COUNT(*) FROM states") == 1


def test_a_cluster_that_never_ends_its_pull_does_not_fill_the_disk(tmp_path: Path) -> None:
    world = World(tmp_path, keep_averages=2, dead_after_s=1e6)
    world.join("a"), world.join("n", outer_params="1" * 64)
    world.core.want_state(member_id("n"))
    files = [StateFile(name="f.safetensors", size_bytes=9, digest=ZERO)]
    offer = StateOffer(id=member_id("a"), version=0, outer_params=[ZERO], files=files)
    world.core.states.complete(world.core.offer_state(offer))
    kept = []
    for outer_step in range(40):
        world.complete("a", outer_step)
        world.close()
        world.applied("a", outer_step, ZERO)
        world.core.want_state(member_id("n"))
        kept.append(world.core.journal.number("SELECT COUNT(*) FROM rounds WHERE kept = 1"))
    assert (
        max(kept) == 2 * 16 and kept[-1] == 2
    )  # the state is too old by now: there will be another


# Its own memory, and its own clock.


def test_a_damaged_memory_is_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a"), world.lease("a", 1, 5)
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
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE members (x)")
    with pytest.raises(ConfigError, match="another version of isles"):
        Journal(path)
    other.close()
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="cannot be opened"):
        Journal(path)


def test_a_hub_that_stood_still_blames_nobody(tmp_path: Path) -> None:
    world = World(tmp_path, dead_after_s=10.0)
    world.join("a")
    world.now += 60.0  # SIGSTOP, or a machine that slept
    world.core.membership.forgive(59.0)
    world.core.drop_silent()
    assert [m["state"] for m in status(world.core)["members"]] == ["living"]
    world.now += 11.0
    world.core.drop_silent()
    assert [m["state"] for m in status(world.core)["members"]] == ["dropped"]


def test_it_is_over_when_all_have_finished(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not world.core.is_over()
    world.join("a"), world.join("b")
    world.core.leave(member_id("a"), has_finished=True)
    assert not world.core.is_over()
    world.core.leave(member_id("b"))  # stopped: it comes back
    assert not world.core.is_over()
    world.join("b")
    world.core.leave(member_id("b"), has_finished=True)
    world.restart()
    assert world.core.is_over()
    world.join("a")
    assert not world.core.is_over()


def test_all_end_together_when_nothing_is_left_of_any(tmp_path: Path) -> None:
    world = World(tmp_path, min_clusters=2, dead_after_s=10.0)
    for name in "abc":
        world.join(name)
    assert world.end("a") is None
    world.complete("b", 0), world.complete("c", 0)
    assert world.close() == ["b", "c"], "a has nothing to contribute"
    assert world.end("b") is None
    world.complete("c", 1)
    assert world.close() == ["c"], "it alone has something left"
    world.complete("c", 2)
    assert world.end("c") is None, "what it has contributed is not decided yet"
    assert world.close() == ["c"]
    world.join("d", version=3)
    assert world.end("c") is None
    world.core.leave(member_id("d"))  # stopped: it may come back in a week
    world.restart()
    assert [world.end(name) for name in "cab"] == [3, 3, 3]
    world.join("d", version=3)
    world.complete("d", 3), world.close()
    assert world.end("a") == 3, "others may have ended with these already"
    world.join("a", version=4)
    assert world.end("a") is None, "it goes on, and ends with d"
    assert world.end("d") == 4 == world.end("a")


def test_the_end_waits_for_who_may_come_back_with_steps_of_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, dead_after_s=10.0)
    world.join("a"), world.join("b")
    world.now = 11.0
    assert world.end("a") is None
    world.core.drop_silent()
    assert world.events("dropped") and world.end("a") is None, "b is started again, say"
    world.join("b")
    world.complete("b", 0), world.close()
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
        world.core.drop_silent()
    assert ends[-1] == 1 and 20 < len(ends) < 25, "a has gone for good"


def test_it_is_left_alone_when_some_have_finished_and_nobody_is_heard(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.join("a"), world.join("b")
    world.core.leave(member_id("b"))  # stopped: both may come back
    assert not world.core.is_left_alone()
    world.core.leave(member_id("a"), has_finished=True)
    assert world.core.is_left_alone() and not world.core.is_over()
    world.join("b")
    assert not world.core.is_left_alone()


def test_status_says_who_is_waited_for_and_why(tmp_path: Path) -> None:
    world = World(tmp_path, dead_after_s=100.0)
    for name in "abc":
        world.join(name)
        world.heartbeat(name, step=1)
    world.complete("a", 0, tokens=30), world.complete("b", 0, tokens=10)
    world.now += 3.0
    with pytest.raises(Refusal):
        world.complete("c", 0, norm=float("nan"))
    world.close()
    world.complete("a", 1)
    world.now += 20.0
    world.heartbeat("b", step=2)
    told = status(world.core)
    a, b, c = told["members"]
    assert (a["weight"], b["weight"], c["weight"]) == (0.75, 0.25, 0.0)
    assert c["refused"].startswith("round 0: ") and a["slow"] == ""
    assert b["slow"] == "training: 0 inner steps since its last round"
    assert c["slow"] == "not heard for 20s"
    (opened,) = told["open"]
    assert (opened["round"], opened["since_s"]) == (1, 20.0)
    assert opened["missing"] == {"b": b["slow"], "c": c["slow"]}
    (commit,) = told["commits"]
    assert commit["participants"] == ["a", "b"] and commit["seconds"] == 3.0
    assert commit["weights"] == {"a": 30, "b": 10} and list(commit["refused"]) == ["c"]

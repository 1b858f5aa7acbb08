"""A member of a run with a valid token that means harm: what the hub takes from it, and keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from isles.outer.hub.core import live, status
from isles.outer.hub.rules import heavy
from isles.outer.messages import (
    MOST_LEASED,
    MOST_SPANS,
    Applied,
    Contribution,
    Heartbeat,
    Join,
    LeaseRequest,
    ShownRecord,
    StateOffer,
)
from isles.outer.samples import RESERVE
from isles.outer.state_file import state_digest, state_head
from isles.run.relay import LONGEST
from isles.run.unauthenticated import Unauthenticated
from tests.outer_world import ZERO, World, after, joining, member_id, refused

REPOSITORY = Path(__file__).parents[2]
HUGE = 2**61


def test_a_field_beyond_its_bound_is_refused_in_every_message():
    own = {"id": member_id("a")}
    join = joining("a").model_dump()
    beat = {**own, "step": 1, "version": 0}
    part = {**own, "tokens": 1, "steps": 1, "samples": [], "digest": ZERO}
    file = {"name": "fragment-0.safetensors", "size_bytes": 10, "digest": ZERO}
    offer = {**own, "version": 0, "outer_params": [ZERO], "files": [file]}
    lease, applied = {**own, "number": 1, "samples": 1}, {**own, "outer_step": 0}
    applied["outer_params"] = ZERO
    many = [[2 * n, 2 * n + 1] for n in range(MOST_SPANS + 1)]
    bad_spans: list[Any] = [[[5, 5]], [[5, 3]], [[-1, 3]], [[0, 2**62]], [[0.5, 3]], many]
    table: list[tuple[type[Any], dict[str, Any], dict[str, list[Any]]]] = [
        (
            Join,
            join,
            {
                "name": ["../x", "x/y", "", "-x", "x" * 65, "x\n", "\x1b[2J"],
                "identity": [{"k": "\x1b[2J"}, {"\n": "v"}, {"k": "v" * 257}],
                "codec": ["\x1b[31m", "x" * 65],
                "pieces": [[], [[0]], [[2**24 + 1]], [[-1]], [[1.5]]],
                "version": [-1, HUGE, "1", 1.5, True],
                "has": [-1, HUGE],
                "outer_params": [["0" * 63], [ZERO] * 4097],
                "holding": bad_spans,
            },
        ),
        (
            Heartbeat,
            beat,
            {
                "phase": ["\x1b]0;OWNED\x07", "a\nb", "x" * 65, "\x9b2J", "\u202e"],
                "tokens_per_s": [1e300, -1.0, "1"],
                "loss": [1e300, -1e300],
                "sync_every": [100_001, -1],
                "exposed_s": [1e300],
                "hidden_s": [1e300],
                **{field: [-1, HUGE, "1"] for field in ("step", "version", "has", "since")},
                **{field: [-1, HUGE, "1"] for field in ("sent_bytes", "received_bytes")},
            },
        ),
        (
            Contribution,
            part,
            {
                "tokens": [0, -1, 2**62, 1.5, "1"],
                "steps": [-1, HUGE],
                "samples": bad_spans,
                "digest": ["0"],
            },
        ),
        (LeaseRequest, lease, {"samples": [0, MOST_LEASED + 1], "number": [0, HUGE]}),
        (Applied, applied, {"outer_step": [-1, HUGE], "outer_params": ["x", "0" * 65]}),
        (
            StateOffer,
            offer,
            {
                "version": [-1, HUGE],
                "outer_params": [["x"], [ZERO] * 4097],
                "files": [
                    [],
                    [{**file, "name": "../x.safetensors"}],
                    [{**file, "size_bytes": HUGE}],
                ],
            },
        ),
        (ShownRecord, {**own, "record": ""}, {"record": ["A" * (LONGEST + 1), "\x1b", "{}"]}),
    ]
    taken = []
    for kind, good, bad in table:
        kind.model_validate_json(json.dumps(good), strict=True)
        fields = set(kind.model_fields) - {"id", "protocol", "ends"}
        assert fields == set(bad), f"{kind.__name__}: a field without a bad value"
        for field, values in bad.items():
            for value in values:
                try:
                    kind.model_validate_json(json.dumps({**good, field: value}), strict=True)
                except ValidationError:
                    continue
                taken.append((kind.__name__, field, str(value)[:40]))
    assert taken == []


# Weights and norms.


def test_a_claim_of_tokens_lifts_no_limit(tmp_path):
    world = World(tmp_path, "ab")
    world.turns("ab", 0, 1, 2, 3, 4, 5)
    # A norm 100 times as large as usual is refused, also with any number of tokens; what passes is
    # at most `outlier` times `outlier`.
    for outer_step, (norm, tokens) in enumerate(((1e16, HUGE), (101.0, HUGE), (11.0, 10)), 6):
        world.complete("a", outer_step)
        world.complete("b", outer_step, norm=norm, tokens=tokens)
        assert world.close() == ["a"], norm
        for name in "ab":
            world.applied(name, outer_step, after(outer_step))
        world.core.reset_done(member_id("b"))


def test_a_share_above_nine_tenths_is_bounded_and_seen(tmp_path):
    world = World(tmp_path, "ac")
    world.complete("a", 0, tokens=100), world.complete("c", 0, tokens=HUGE)
    assert world.close() == ["a", "c"]
    assert world.answer(0).weights == {"a": 100, "c": 1000}
    assert "the limit for now" in world.events("weight")[0]
    assert "90.9% of the average of round 0" in world.events("weight")[1]
    assert status(world.core)["heavy"] == {"name": "c", "share": pytest.approx(0.909, abs=1e-3)}
    for outer_step in (1, 2):  # told once
        world.complete("a", outer_step, tokens=10), world.complete("c", outer_step, tokens=100)
        world.close()
    assert len(world.events("weight")) == 2
    world.turn("ac", 3)
    assert status(world.core)["heavy"] is None
    assert heavy({"a": 1, "b": 9}) is None and heavy({"a": 5}) is None


def test_no_more_tokens_count_than_samples_were_leased(tmp_path):
    world = World(tmp_path)
    identity = {"layout": "a", "data.seq_length": "10"}
    for name in "ab":
        world.join(name, identity=identity)
        world.lease(name, 1, 8)
    world.complete("a", 0, tokens=80)
    world.complete("b", 0, [(RESERVE + 2**33, 2**61)], tokens=HUGE)  # a reserve, but not its own
    world.close()
    assert world.answer(0).weights == {"a": 80, "b": 2 * 10 * 16}


def test_rounds_far_off_are_early_and_past_ones_are_late(tmp_path):
    world = World(tmp_path, "ae", open_rounds=8)
    world.turns("ae", 0, 1)
    assert refused(world.complete, "e", 10).kind == "early"
    assert refused(world.complete, "e", 10**12).kind == "early"
    assert refused(world.complete, "n", 1).kind == "unknown"
    assert refused(world.core.rounds.check, world.core.membership.find(member_id("e")), 1).kind == (
        "late"
    )
    assert refused(world.applied, "e", 2, ZERO).kind == "early"
    assert refused(world.join, "n", version=3).kind == "ahead"
    world.heartbeat("e", step=10**12, version=10**12, has=10**12, since=10**12)
    assert world.core.membership.get(world.number("e"))["version"] == 2
    # What it has sent once counts once.
    world.complete("e", 2, tokens=10), world.complete("e", 2, tokens=HUGE)
    world.turn("a", 2)
    assert world.answer(2).weights == {"a": 10, "e": 10}


# States and reports.


def test_a_diverged_members_state_is_given_to_nobody(tmp_path):
    world = World(tmp_path, "ae", keep_averages=2)
    world.turns("ae", 0, 1, 2, 3)
    assert world.join("n").standing == "behind"
    assert world.turn("ae", 4) == ["a", "e"]
    world.applied("e", 4, "e" * 64)
    world.heartbeat("e", version=5)
    assert world.want_state("n").source == "e"
    number = world.offer_state("e", 5, "e" * 64)
    world.core.states.complete(number)
    assert world.want_state("n").state is None, "its weights are not decided"
    world.applied("a", 4, after(4))
    assert world.heartbeat("e", version=5).command == "pull"
    world.heartbeat("a", version=5)
    for _ in range(3):
        answer = world.want_state("n")
        assert answer.state is None and answer.source == "a"
    assert world.core.journal.number("SELECT COUNT(*) FROM states") == 0
    assert "differs from the run's" in refused(world.offer_state, "e", 5, "e" * 64).what
    right = world.offer_state("a", 5, after(4))
    world.core.states.complete(right)
    assert world.want_state("n").outer_params == [after(4)]
    # A cluster with a flipped bit, which most others find out of what it has given before.
    world.core.journal.run("UPDATE rounds SET outer_params = ? WHERE round = 4", "b" * 64)
    assert world.want_state("n").state is None
    assert world.core.journal.number("SELECT COUNT(*) FROM states") == 0


def test_nobody_begins_with_weights_that_are_not_decided(tmp_path):
    """Before the others have reported, one gives a newcomer weights of its own, with their digest.

    It reports the right digest then: it has changed its report, and that counts as other weights.
    """
    for names in ("abe", "eab", "ae"):
        (tmp_path / names).mkdir()
        world = World(tmp_path / names, names, keep_averages=2)
        world.turns("".join(sorted(names)), 0, 1, 2)
        assert world.join("n").standing == "behind"
        world.turn(names, 3)
        world.heartbeat("e", version=4)
        world.applied("e", 3, "e" * 64)
        assert world.want_state("n").source == "e"
        world.core.states.complete(world.offer_state("e", 4, "e" * 64))
        told = world.want_state("n")
        assert told.state is None and told.source != "e"
        world.now += 11.0  # the others are cut off for some seconds
        for name in "en":
            world.heartbeat(name, version=4)
        world.drop_silent()
        assert world.want_state("n").state is None
        world.applied("e", 3, after(3))
        assert world.want_state("n").state is None
        honest = names.replace("e", "")
        for name in honest:
            world.applied(name, 3, after(3))
            world.heartbeat(name, version=4)
        told = world.want_state("n")
        assert (told.state, told.source) == (None, honest[0])
        assert not list((world.folder / "states").glob("*"))
        assert world.heartbeat("e", version=4).command == "pull"
        assert world.events("diverged")[0].startswith("e: its outer parameters after round 3")
        number = world.offer_state(honest[0], 4, after(3))
        world.core.states.complete(number)
        assert world.want_state("n").state == number
        assert world.join("n", version=4, outer_params=after(3)).standing == "current"


def test_a_source_of_wrong_states_is_asked_last_and_keeps_one_on_the_disk(tmp_path):
    world = World(tmp_path, "abe", keep_averages=1, source_s=60.0, dead_after_s=1e4)
    core = world.core
    world.turns("abe", 0, 1)
    world.join("n"), world.want_state("n")
    for outer_step in range(2, 8):
        world.turn("abe", outer_step)
        world.heartbeat("e", version=outer_step + 1)
        world.do(core.states.ask, world.number("e"))
        core.states.complete(world.offer_state("e", outer_step + 1, "e" * 64))
        assert core.journal.number("SELECT COUNT(*) FROM states WHERE member = 3") == 1
        if outer_step < 7:
            world.want_state("n")
            for name in "abe":  # what it reports is right
                world.applied(name, outer_step, after(outer_step))
    for name in "ab":
        world.applied(name, 7, after(7))
        world.heartbeat(name, version=7)
    assert world.want_state("n").source == "a" and world.heartbeat("e", version=8).command == ""
    assert core.journal.number("SELECT COUNT(*) FROM states") == 0
    assert "differs from the run's" in world.events("refused")[0]


def test_who_does_not_report_keeps_newcomers_out_for_some_rounds_only(tmp_path):
    """Two clusters are no majority without it; and what is given is not decided at first."""
    world = World(tmp_path, "ea", keep_averages=2)
    world.turns("ae", 0, 1, 2)
    assert world.join("n").standing == "behind"
    given = None
    for outer_step in range(3, 8):
        world.turn("ea", outer_step)
        world.applied("a", outer_step, after(outer_step))
        for name in "ea":
            world.heartbeat(name, version=outer_step + 1)
        world.want_state("n")
        world.do(world.core.states.ask, world.number("a"))
        if given is None:
            given = world.offer_state("a", outer_step + 1, after(outer_step))
            world.core.states.complete(given)
        told = world.want_state("n")
        assert (told.state is None) == (outer_step < 5), outer_step
    assert told.state == given and told.outer_params == [after(3)]
    # One that is alone decides, also if it has come back with other weights.
    (tmp_path / "alone").mkdir()
    world = World(tmp_path / "alone", "a", keep_averages=1)
    world.turns("a", 0, 1)
    world.applied("a", 1, "b" * 64)
    world.join("n"), world.want_state("n")
    number = world.offer_state("a", 2, "b" * 64)
    world.core.states.complete(number)
    assert world.want_state("n").state == number


def test_a_state_is_what_was_announced(tmp_path):
    path, pieces = tmp_path / "fragment-0.safetensors", [3, 2]
    head, numbers = state_head("a", 0, 5, 5, has_momentum=True), bytes(range(20))
    path.write_bytes(head + numbers + bytes(20))
    right = state_digest(path, "a", 0, 5, pieces)
    assert len(right) == 64
    for layout, fragment, version in (("b", 0, 5), ("a", 1, 5), ("a", 0, 6)):
        assert state_digest(path, layout, fragment, version, pieces) == ""
    for content in (b"", head, head + numbers, head + numbers + bytes(21), bytes(1000)):
        path.write_bytes(content)
        assert state_digest(path, "a", 0, 5, pieces) == "", content
    for nan in (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"):
        for content in (numbers[:16] + nan + bytes(20), numbers + bytes(16) + nan):
            path.write_bytes(head + content)
            assert state_digest(path, "a", 0, 5, pieces) == "", "it would spoil who takes it over"
    (tmp_path / "hub").mkdir()
    world = World(tmp_path / "hub", "an")
    world.core.states.touch()
    world.want_state("n")
    number = world.offer_state("a", 0, ZERO)
    world.do(world.core.states.refuse, number)
    assert "does not exist" in refused(world.core.states.download, number, 0).what
    assert "differs from its announcement" in world.events("refused")[0]


def test_reports_under_many_names_outvote_nobody(tmp_path):
    world = World(tmp_path, "ab", max_clusters=3)
    world.turn("ab", 0)
    world.applied("a", 0, after(0)), world.applied("b", 0, after(0))
    for number in range(20):
        name = f"e{number}"
        world.join(name)
        world.applied(name, 0, "e" * 64)
        world.leave(name, has_finished=True)
    assert world.heartbeat("a").command == "" == world.heartbeat("b").command
    assert world.core.verdicts.diverged(1, [after(0)]) == []
    world.join("c", version=1, outer_params=after(0))
    for outer_step in range(-1, -9, -1):  # and of rounds that nobody knows nothing is kept
        with pytest.raises(ValidationError):
            world.applied("c", outer_step, ZERO)


# Connections without the token.


def test_strangers_are_few_and_have_ten_seconds():
    now, ended = 0.0, list[int]()
    waiting = Unauthenticated(ended.append, most=3, clock=lambda: now)
    for number in range(5):
        waiting.add(number, "192.0.2.1")
    assert ended == [0, 1], "the oldest go"
    assert waiting.forget(3) and not waiting.forget(3), "it has shown its token"
    now = 10.1
    waiting.add(5, "192.0.2.1")
    waiting.look()
    assert ended == [0, 1, 2, 4], "and those that are late"


def test_strangers_of_one_address_end_only_their_own_connections():
    ended = list[str]()
    waiting = Unauthenticated[str](ended.append)
    ranks = [f"rank {number}" for number in range(64)]
    for rank in ranks:  # of one cluster, behind one address
        waiting.add(rank, "198.51.100.7")
    for number in range(3000):
        waiting.add(f"v4 {number}", "192.0.2.1")
        waiting.add(f"v6 {number}", f"2001:db8::{number:x}")  # of one site
    for number in range(200):  # together more than there is room for: who has most makes room
        waiting.add(f"few {number}", f"203.0.113.{number % 100}")
        waiting.add(f"v4 again {number}", "192.0.2.1")
    assert waiting.forget("few 199") and waiting.forget("few 100")
    assert sum(waiting.forget(rank) for rank in ranks) >= 16
    assert len(ended) == 64 + 6000 + 400 - 256


# What a member can still do: each line of docs/security.md has its tests.


def test_each_line_of_the_page_about_members_has_its_test():
    """tests/security.md has the beginning of each line as a heading, with details and tests."""
    both = [(REPOSITORY / folder / "security.md").read_text() for folder in ("docs", "tests")]
    wrong = [
        f"{file}::{name} does not exist"
        for file, name in re.findall(r"`(tests/\S+\.py)::(\w+)`", both[1])
        if f"def {name}(" not in (REPOSITORY / file).read_text()
    ]
    for title in ("## What isles refuses", "## What a malicious member can still do"):
        sections = [text.partition(f"{title}\n")[2].partition("\n## ")[0] for text in both]
        lines = [line.replace("**", "") for line in re.split(r"\n- ", sections[0])[1:]]
        parts = [part.partition("\n") for part in re.split(r"\n### ", sections[1])[1:]]
        assert len(lines) == len(parts) > 10, title
        for line, (head, _, body) in zip(lines, parts, strict=True):
            is_tested = all("::" in item for item in re.split(r"\n- ", body)[1:])
            if not (line.startswith(head) and "::" in body and is_tested):
                wrong.append(f"{title}: {head} or {line[:60]}")
    assert wrong == []


def test_updates_that_look_normal_are_averaged(tmp_path):
    world = World(tmp_path, "ae")
    world.turns("ae", 0, 1, 2, 3)
    world.complete("a", 4), world.complete("e", 4, norm=9.0)
    assert world.close() == ["a", "e"]


def test_a_member_that_says_it_works_holds_up_a_round_that_waits_for_all(tmp_path):
    for wait, rules in (("all", {}), ("time_boxed", {"time_box_s": 5.0})):
        (tmp_path / wait).mkdir()
        world = World(tmp_path / wait, "ae", wait=wait, **rules)
        world.complete("a", 0)
        for step in range(20):
            world.now += 1.0
            world.heartbeat("a"), world.heartbeat("e", step=step)
        assert (world.close() is None) == (wait == "all")


def test_who_is_left_alone_decides_rounds_as_fast_as_it_sends(tmp_path):
    for leave in ("drop", "leave"):
        (tmp_path / leave).mkdir()
        world = World(tmp_path / leave, "abe", min_clusters=2)
        world.turns("abe", 0)
        for name in "ab":
            getattr(world, leave)(name)
        assert world.turn("e", 1) is None, "min_clusters holds back one name"
        world.join("f", version=1, outer_params=after(0))
        since = world.now
        for outer_step in range(1, 9):
            world.complete({"e", "f"} if outer_step > 1 else "f", outer_step)
            assert world.close() == ["e", "f"]
        assert world.now == since
        back = world.join("a", version=1, outer_params=after(0))
        assert (back.standing, back.outer_step) == ("late", 9), "it applies the averages"
        world.core.journal.close()


def test_the_majority_is_right(tmp_path):
    world = World(tmp_path, "aef")
    world.turn("aef", 0)
    world.applied("a", 0, after(0)), world.applied("e", 0, ZERO), world.applied("f", 0, ZERO)
    assert world.heartbeat("a").command == "pull"


def test_the_first_member_says_which_run_it_is(tmp_path):
    world = World(tmp_path)
    assert world.join("e", version=7).standing == "first"
    assert world.join("a", version=0).standing == "behind"


def test_half_of_the_contributions_can_raise_the_usual_norm(tmp_path):
    world = World(tmp_path, "ae")
    world.turns("ae", 0, 1)
    norm = 1.0
    for outer_step in range(2, 20):
        world.complete("a", outer_step), world.complete("e", outer_step, norm=norm)
        assert world.close() == ["a", "e"]
        norm = min(9.0 * norm, 9.0)
        world.applied("a", outer_step, after(outer_step))
        world.applied("e", outer_step, after(outer_step))
    # The limit follows the median of all, so it rises when half of them are large.
    world.complete("a", 20), world.complete("e", 20, norm=40.0)
    assert world.close() == ["a", "e"]


def test_who_was_first_for_some_rounds_keeps_out_as_many_as_it_is(tmp_path):
    world = World(tmp_path, "e")
    for outer_step in range(4):
        world.complete("e", outer_step, norm=1e-6), world.close()
    world.join("a", version=4, outer_params=ZERO)
    for outer_step in range(4, 12):
        world.complete("a", outer_step), world.complete("e", outer_step, norm=1e-6)
        assert world.close() == ["e"]


def test_half_of_the_clusters_pass_with_large_norms_in_the_first_rounds(tmp_path):
    for names, accepted in (("abef", "abef"), ("abcef", "abc")):
        (folder := tmp_path / names).mkdir()
        world = World(folder, names)
        world.complete(set(names) - {*"ef"}, 0), world.complete("ef", 0, norm=1e6)
        assert world.close() == list(accepted)


def test_a_wrong_momentum_is_not_seen_in_a_state(tmp_path):
    path, weights = tmp_path / "fragment-0.safetensors", bytes(range(20))
    digests = set()
    for momentum in (bytes(20), b"\x3f" * 20):
        path.write_bytes(state_head("a", 0, 5, 5, has_momentum=True) + weights + momentum)
        digests.add(state_digest(path, "a", 0, 5, [5]))
    assert len(digests) == 1


def test_a_member_reads_what_all_show(tmp_path):
    world = World(tmp_path, "ae")
    world.do(world.core.show, ShownRecord(id=member_id("a"), record="YQ=="))
    assert live(world.core)["members"]["a"]["record"] == "YQ=="

"""What the link and the side process compute: sample intervals, who averages what, the spool."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pydantic import ValidationError

from isles.outer.average import average_size, size
from isles.outer.gloo.average import make_plan
from isles.outer.link.account import Account
from isles.outer.link.messages import (
    COMMANDS,
    EVENTS,
    Alive,
    Begin,
    Claimed,
    Committed,
    Contribute,
    Joined,
    Member,
    Progress,
    Reset,
    SamplesLost,
)
from isles.outer.link.settings import LinkSettings
from isles.outer.side.spool import Spool
from isles.outer.spans import joined, without
from tests.each import each


def test_intervals_are_sets_of_numbers() -> None:
    chance = random.Random(0)
    for _ in range(200):
        one, other = (
            [(s, s + chance.randint(1, 5)) for s in chance.choices(range(30), k=4)]
            for _ in range(2)
        )
        numbers = [{n for span in spans for n in range(*span)} for spans in (one, other)]
        for spans, wanted in (
            (joined(one), numbers[0]),
            (without(one, other), numbers[0] - numbers[1]),
        ):
            assert [n for span in spans for n in range(*span)] == sorted(wanted)
            assert joined(spans) == spans, "neither empty intervals nor neighbours"


@each("codec", ["none", "int4", "topk:0.02"])
@each("ranks", [1, 2, 3, 7])
def test_every_piece_is_averaged_by_one_rank(codec: str, ranks: int) -> None:
    counts = [2**20] * 21 + [500, 2**20, 3]
    plan = make_plan(codec, counts, ranks)
    assert sorted(piece for own in plan.slices for run in own for piece in run) == [*range(24)]
    assert len({len(own) for own in plan.slices}) == 1, "all take part in every slice"
    assert plan.starts[-1] == sum(size(codec, count) for count in counts)
    assert plan.average_starts[-1] == sum(average_size(codec, count, ranks) for count in counts)
    loads = [sum(plan.bytes_of(run)[1] for run in own) for own in plan.slices]
    assert sum(loads) == plan.starts[-1]
    assert max(loads) - min(loads) <= 2 * size(codec, 2**20)
    for own in plan.slices:
        for run in own:
            assert len(run) <= 1 or plan.bytes_of(run)[1] <= 8 * 2**20


def test_more_ranks_than_pieces() -> None:
    plan = make_plan("int8", [10, 10], 5)
    assert sorted(len(run) for own in plan.slices for run in own) == [0, 0, 0, 1, 1]


def test_the_spool_keeps_what_may_be_asked_for(tmp_path: Path) -> None:
    spool = Spool(tmp_path, kept=2, since=5, most_bytes=0)
    for turn in range(6):
        for path in (spool.average(turn), spool.attempt(turn, 7)):
            path.touch()
        (tmp_path / f"contribution-{turn:08d}").touch()
    spool.pulled.mkdir()
    (tmp_path / "average-00000001.partial").touch()
    spool.tidy(5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "attempt-00000005-7",
        "average-00000003",
        "average-00000004",
        "average-00000005",
        "contribution-00000005",
        "pulled",
    ]
    assert spool.attempts(5) == [spool.attempt(5, 7)]


def test_averages_that_a_checkpoint_lacks_stay_as_long_as_there_is_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, kept=1, since=2, most_bytes=30)
    for turn in (0, 1, 2, 3, 4, 5, 6, 7, 9):
        spool.average(turn).write_bytes(b"x" * 10)
    assert spool.has(2) == 8 and spool.has(8) == 8 and spool.has(9) == 10
    spool.tidy(6)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == list("2345679")
    assert spool.has(2) == 8
    spool.tidy(7)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == list("345679"), "30 bytes"
    assert spool.has(2) == 2
    spool.since = 6
    spool.tidy(7)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == list("679")


MEMBER = Member(name="a", member_id="0" * 32, identity={}, codec="int8", pieces=[[3], [4]])


def begun(account: Account) -> Begin:
    """What a side process is told that is started now."""
    return account.begin(MEMBER, LinkSettings(), Path("join"), Path("spool"), Progress())


def committed(turn: int, *names: str) -> Committed:
    return Committed(
        turn=turn,
        path=Path(f"average-{turn}"),
        digest="",
        is_in="a" in names,
        weights=dict.fromkeys(names, 10),
        refused={},
        size_bytes=8,
    )


def contribution(turn: int, *samples: tuple[int, int]) -> Contribute:
    return Contribute(
        turn=turn, path=Path("part"), tokens=1, samples=samples, inner_steps=1, norm=1.0
    )


def test_a_side_process_that_is_started_again_says_nothing_twice() -> None:
    account = Account(3, ["0" * 64, "1" * 64], [(0, 8)])
    claim = account.claim(8)
    assert not begun(account).has_joined and begun(account).claims == (claim,)
    assert account.take(Joined(standing="late", turn=5, from_turn=5)) is not None
    dealt = Claimed(number=claim.number, samples=((8, 16),))
    assert account.take(dealt) == dealt and account.take(dealt) is None
    assert account.holding == [(0, 16)] and begun(account).has_joined

    # Turn 3 was missed; turn 4 has this cluster's contribution; turn 5 came too early for it.
    assert account.take(committed(3, "b")) is not None
    account.contributions[4] = contribution(4, (0, 8))
    assert begun(account).contributions == (account.contributions[4],)
    assert account.take(committed(3, "b")) is None, "not applied yet, but told"
    account.applied(3, "2" * 64)
    assert account.take(committed(4, "a", "b")).is_in
    assert account.holding == [(8, 16)] and begun(account).contributions == ()
    assert account.take(committed(5, "b")) is not None
    account.contributions[5] = contribution(5, (8, 12))
    account.applied(4, "3" * 64), account.applied(5, "4" * 64)
    now = begun(account)
    assert (now.version, now.outer_params) == (6, ("3" * 64, "4" * 64))
    assert now.contributions == () and now.holding == ((8, 16),)
    # What a former attempt contributed is not what this one has learnt.
    assert not account.take(committed(6, "a")).is_in


def test_samples_in_a_contribution_are_not_lost_with_it() -> None:
    account = Account(0, ["0" * 64], [(0, 20)])
    account.contributions[0] = contribution(0, (0, 8))
    lost = account.take(SamplesLost(samples=((4, 12),)))
    assert lost == SamplesLost(samples=((8, 12),))
    assert account.holding == [(0, 8), (12, 20)]
    account.adopted(7, ["5" * 64])
    assert begun(account).contributions == () and begun(account).version == 7
    assert account.take(committed(6, "b")) is None
    assert account.take(committed(7, "b")) is not None


def test_an_order_is_obeyed_once() -> None:
    account = Account(0, ["0" * 64], [])
    order = Reset(why="turn 3 was refused")
    assert account.take(order) == order and account.take(order) is None
    assert account.obey().why == order.why == begun(account).obeyed
    assert account.take(order) is None
    assert account.take(Reset(why="turn 9 was refused")) is not None


def test_lines_come_back_as_they_were_and_nothing_else_is_taken(tmp_path: Path) -> None:
    begin = Begin(
        member=Member(name="a", member_id="0" * 32, identity={}, codec="int8", pieces=[[3]]),
        settings=LinkSettings(engine="gloo"),
        join_file=tmp_path / "join",
        spool=tmp_path,
        version=3,
        kept_since=2,
        outer_params=("1" * 64,),
        holding=((0, 8), (16, 24)),
    )
    assert COMMANDS.validate_json(COMMANDS.dump_json(begin)) == begin
    event = Committed(
        turn=3,
        path=None,
        digest="",
        is_in=False,
        weights={"b": 1, "a": 2},
        refused={"c": "its norm"},
        size_bytes=0,
    )
    assert EVENTS.validate_json(EVENTS.dump_json(event)) == event
    assert event.participants == ("a", "b")
    line = EVENTS.dump_json(Alive(sent_bytes=1, received_bytes=2))
    for broken in (line[:-1], line.replace(b"alive", b"dead"), b"[]", b""):
        with pytest.raises(ValidationError):
            EVENTS.validate_json(broken)

"""The samples of one cluster: each is read once, told once, and none is forgotten."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from isles.outer.samples import Interval, OwnSamples, joined, reserve_of, without

ME = "ab" * 16
SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 5)).map(lambda span: (span[0], sum(span)))
)


def numbers(spans: list[Interval]) -> list[int]:
    return [number for start, stop in spans for number in range(start, stop)]


@given(SPANS, SPANS)
def test_intervals_are_sets_of_numbers(one: list[Interval], other: list[Interval]) -> None:
    for spans, wanted in (
        (joined(one), set(numbers(one))),
        (without(one, other), set(numbers(one)) - set(numbers(other))),
    ):
        assert numbers(spans) == sorted(wanted)
        assert joined(spans) == spans, "neither empty intervals nor neighbors"


def test_what_was_read_of_the_reserve_is_told_and_not_held() -> None:
    own, other = OwnSamples(ME), OwnSamples("cd" * 16)
    own.add([(0, 4)])
    own.add_reserve(8)
    other.add_reserve(8)
    mine, others = set(own.numbers(4, 8).tolist()), set(other.numbers(0, 8).tolist())
    assert len(mine) == 8 and not mine & others and max(mine | others) < 2**62
    own.add([(7, 9)])
    reserve, _ = reserve_of(ME)
    assert mine == set(range(reserve, reserve + 8)) and own.holding([]) == [(0, 4), (7, 9)]
    told = own.take_read(14)
    assert told == [(0, 4), (7, 9), (reserve, reserve + 8)] and own.frontier == 9
    own.give_back(told)
    assert own.holding([]) == [(0, 4), (7, 9)] and own.take_read(14) == told


def test_what_was_lost_to_others_is_read_and_told_when_it_is_leased_again() -> None:
    own = OwnSamples(ME)
    own.add([(0, 8)])
    own.lose([(4, 8)], cursor=0)
    own.add([(4, 6)])
    assert own.numbers(0, 6).tolist() == [0, 1, 2, 3, 4, 5] and own.holding([]) == [(0, 6)]
    assert own.take_read(6) == [(0, 6)]


STEPS = st.lists(
    st.tuples(st.sampled_from(["deal", "read", "tell", "owe", "lose", "save"]), st.integers(1, 9)),
    max_size=40,
)


@given(STEPS)
def test_no_sample_is_read_twice_or_forgotten(steps: list[tuple[str, int]]) -> None:
    own, cursor, leased, lost = OwnSamples(ME), 0, 0, []
    read: list[int] = []
    sent: list[list[Interval]] = []
    for what, count in steps:
        if what == "deal":
            own.add([(leased, leased + count)])
            leased += count
        elif what == "read" and own.covers(cursor, count):
            read += own.numbers(cursor, count).tolist()
            cursor += count
        elif what == "tell":
            sent.append(own.take_read(cursor))
        elif what == "owe" and sent:
            own.give_back(sent.pop())
        elif what == "lose":
            ahead = without([(leased - count, leased)], joined([(n, n + 1) for n in [-1, *read]]))
            gone = [span for span in ahead if span[0] >= 0]
            own.lose(gone, cursor)
            lost += gone
        elif what == "save":
            record = json.loads(json.dumps(own.record()))
            own = OwnSamples(ME)
            own.restore(record)
    told = [span for spans in sent for span in spans]
    assert len(read) == len(set(read)) and not set(read) & set(numbers(joined(lost)))
    assert len(numbers(told)) == len(set(numbers(told))), "told twice"
    kept = sorted(set(range(leased)) - set(numbers(joined(lost))))
    assert sorted(numbers(own.holding(told))) == kept
    ahead = own.numbers(cursor, own.left(cursor)).tolist() if own.left(cursor) else []
    assert sorted([*read, *ahead]) == kept

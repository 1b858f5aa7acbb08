"""The solver against trying everything, and what it must give where many splits are as fast."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.balance.curve import Curve, slowest, step_seconds
from isles.balance.solve import are_alike, fastest_split
from isles.dist.split import RowSplit, shared_split


def affine(overhead: float, per_row: float, limit: int = 8) -> Curve:
    """A rank whose micro-batches cost a fixed time and some more for each row."""
    return Curve((1, 2), (overhead + per_row, overhead + 2 * per_row), limit)


@st.composite
def curves(draw: st.DrawFn, most: int = 3) -> list[Curve]:
    """Of some ranks; times never fall with the rows, and rows together never cost more than apart.

    Drawn as whole numbers, so that equal times are equal.
    """
    ranks = []
    for _ in range(draw(st.integers(1, most))):
        limit = draw(st.integers(1, 4))
        seconds = [draw(st.integers(1, 9))]
        for size in range(2, limit + 1):
            together = min(seconds[i] + seconds[size - 2 - i] for i in range(size - 1))
            seconds.append(draw(st.integers(seconds[-1], together)))
        ranks.append(Curve(tuple(range(1, limit + 1)), tuple(map(float, seconds)), limit))
    return ranks


def every_split(ranks: list[Curve], rows: int, *, in_step: bool) -> Iterator[RowSplit]:
    """All there are."""
    for dealt in itertools.product(range(rows + 1), repeat=len(ranks)):
        if sum(dealt) == rows:
            for sizes in itertools.product(*(range(1, curve.limit + 1) for curve in ranks)):
                yield RowSplit(dealt, sizes, in_step)


@pytest.mark.parametrize("in_step", [False, True])
@settings(max_examples=150, deadline=None)
@given(ranks=curves(), rows=st.integers(1, 9))
def test_nothing_is_faster(in_step: bool, ranks: list[Curve], rows: int) -> None:
    best = min(step_seconds(split, ranks) for split in every_split(ranks, rows, in_step=in_step))
    found = fastest_split(ranks, rows, in_step=in_step)
    assert sum(found.rows) == rows
    for rank, curve in enumerate(ranks):
        steps = found.micro_steps(rank)
        assert sum(steps) == found.rows[rank]
        assert max(steps) <= curve.limit
    assert step_seconds(found, ranks) == pytest.approx(best, rel=1e-9)


def test_slow_ranks_keep_a_row_where_it_costs_nothing() -> None:
    """Without rows a rank computes one all the same: to give it none gains nothing."""
    ranks = [affine(1.0, 1.0), affine(1.0, 1.0), affine(0.01, 0.01)]
    assert fastest_split(ranks, 6, in_step=False).rows == (1, 1, 4)


def test_alike_within_a_tenth() -> None:
    assert are_alike([affine(1.0, 1.0), affine(1.04, 1.04), affine(1.09, 1.09)])
    assert not are_alike([affine(1.0, 1.0), affine(1.0, 1.3)])


def test_thousands_of_rows_on_dozens_of_ranks_take_seconds() -> None:
    ranks = [affine(0.01 + i % 7 / 50, 0.05 + i % 11 / 30, 8 + i % 3 * 8) for i in range(64)]
    for in_step in (False, True):
        began = time.process_time()
        split = fastest_split(ranks, 4096, in_step=in_step)
        assert time.process_time() - began < 20
        ideal = 4096 / sum(curve.rows_per_second for curve in ranks)
        assert sum(split.rows) == 4096
        assert step_seconds(split, ranks) < (1.5 if in_step else 1.05) * ideal


@settings(deadline=None)
@given(
    shares=st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda s: sum(s) > 1e-3),
    rows=st.integers(1, 500),
    limit=st.integers(1, 9),
)
def test_shares_are_met_to_the_row(shares: list[float], rows: int, limit: int) -> None:
    split = shared_split(rows, shares, [limit] * len(shares), in_step=False)
    assert sum(split.rows) == rows
    for own, share in zip(split.rows, shares, strict=True):
        assert abs(own - rows * share / sum(shares)) < 1 + 1e-9
    assert max(split.micro_batch_sizes) <= limit


def test_the_slowest_of_ranks_that_share_their_rows() -> None:
    both = slowest([affine(1.0, 1.0), affine(3.0, 0.5, 4)])
    assert [both.time(size) for size in (1, 2)] == [3.5, 4.0]
    assert both.limit == 4


def test_a_curve_comes_back_from_its_record() -> None:
    curve = Curve.of({1: 1.0, 4: 0.9, 8: 3.0}, 6)
    assert curve.seconds == (0.9, 0.9, 1.8), "what noise has added is taken out"
    assert Curve.read(curve.record()) == curve
    assert [curve.time(n) for n in (0, 6, 12)] == pytest.approx([0.9, 1.35, 2.7])

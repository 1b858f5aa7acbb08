"""The global order of samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.data.order import PERIOD, SampleOrder, key_from, permute, shares
from tests.each import each

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=4)
seeds = st.integers(0, 2**63 - 1)


@given(st.integers(2**40, 2**62), seeds)
@settings(max_examples=20, deadline=None)
def test_permute_stays_inside_huge_ranges(n: int, seed: int):
    index = np.array([0, 1, 2, n // 2, n - 2, n - 1])
    placed = permute(index, n, key_from(seed))
    assert len(set(placed.tolist())) == 6 and placed.min() >= 0 and placed.max() < n


def test_permute_looks_shuffled():
    n = 20_000
    placed = permute(np.arange(n), n, key_from(0))
    other = permute(np.arange(n), n, key_from(1))
    assert abs(np.corrcoef(np.arange(n), placed)[0, 1]) < 0.03
    assert abs(np.corrcoef(placed[:-1], placed[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(placed, other)[0, 1]) < 0.03
    # The mean distance of two random places is n/3, and one fixed point is expected.
    assert abs(np.abs(placed - np.arange(n)).mean() - n / 3) < n / 50
    assert (placed == np.arange(n)).sum() < 8


@given(sizes, seeds, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_an_epoch_holds_every_sample_once(sizes: list[int], seed: int, epoch: int):
    order = SampleOrder(sizes, None, seed)
    total = order.samples_per_epoch
    source, sample = order.locate(np.arange(epoch * total, (epoch + 1) * total))
    seen = sorted(zip(source.tolist(), sample.tolist(), strict=True))
    assert seen == [(k, i) for k, size in enumerate(sizes) for i in range(size)]


@given(sizes, st.booleans(), seeds, st.data())
@settings(max_examples=15, deadline=None)
def test_a_sample_depends_on_its_index_alone(
    sizes: list[int], weighted: bool, seed: int, data: st.DataObject
):
    weights = [float(i + 1) for i in range(len(sizes))] if weighted else None
    ids = np.array(data.draw(st.lists(st.integers(0, 3 * PERIOD), min_size=1, max_size=9)))
    together = SampleOrder(sizes, weights, seed).locate(ids)
    for place, sample_id in enumerate(ids):
        alone = SampleOrder(sizes, weights, seed).locate(np.array([sample_id]))
        assert (alone[0][0], alone[1][0]) == (together[0][place], together[1][place])


@each("weights", [None, [1.0]])
def test_every_epoch_has_an_order_of_its_own(weights: list[float] | None):
    _, sample = SampleOrder([500], weights, seed=2).locate(np.arange(1000))
    assert not np.array_equal(sample[:500], sample[500:])


def test_a_period_holds_the_sources_in_proportion():
    order = SampleOrder([1000, 10, 50], [3.0, 1.0, 1e-9], seed=5)
    for period in (0, 4):
        source, _ = order.locate(np.arange(PERIOD) + period * PERIOD)
        assert np.bincount(source).tolist() == shares([3.0, 1.0, 1e-9], PERIOD)
    assert np.bincount(source)[2] == 1
    # And evenly within it, not one source after another.
    assert abs((source[:1000] == 0).mean() - 0.75) < 0.05


def test_a_weighted_source_is_read_in_epochs_of_its_own():
    sizes = [700, 33_000]
    order = SampleOrder(sizes, [1.0, 1.0], seed=9)
    source, sample = order.locate(np.arange(3 * PERIOD))
    for k, size in enumerate(sizes):
        drawn = sample[source == k]
        for start in range(0, len(drawn) - size + 1, size):
            assert np.array_equal(np.sort(drawn[start : start + size]), np.arange(size))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30), st.integers(30, 5000))
@settings(max_examples=100, deadline=None)
def test_shares_add_up(weights: list[float], slots: int):
    dealt = shares(weights, slots)
    assert sum(dealt) == slots and min(dealt) >= 1
    for share, weight in zip(dealt, weights, strict=True):
        assert share < weight / sum(weights) * slots + 1 + 1e-6 or share == 1


def test_streams_are_mixed_exactly_and_nothing_is_skipped():
    order = SampleOrder(None, [3, 1], 7)
    source, number = order.locate(np.arange(3 * PERIOD))
    for k, share in enumerate((3 / 4, 1 / 4)):
        assert (number[source == k] == np.arange((source == k).sum())).all(), "in order, each once"
        assert (source[:PERIOD] == k).sum() == share * PERIOD

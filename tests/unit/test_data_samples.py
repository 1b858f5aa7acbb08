"""Split, packing and padding: each token where it belongs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.data.builders import Ranges, cut, packed, split_store
from isles.data.mix import Dataset
from isles.data.order import SampleOrder
from isles.data.samples import FakeSamples, Samples
from isles.data.tokens.store import TokenStore
from isles.dist.batch import IGNORE_INDEX

END = 9999
"""The end-of-text id of the stores below; all other ids count up from 0."""

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def store_of(lengths: list[int]) -> TokenStore:
    """Documents of these lengths; the tokens are their places, so that each is known again."""
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1], dtype=np.uint16)
    return TokenStore(Path("nowhere"), "counted", tokens, ends, END, int(ends[-1]) - 1)


def everything(store: TokenStore) -> Ranges:
    training, validation = split_store(store, 0, seed=0)
    assert validation is None
    return training


def read_all(part: Samples, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.full((part.num_samples, seq_length), -7, dtype=np.int64)
    targets = np.full_like(inputs, -7)
    for sample in range(part.num_samples):
        part.read(sample, inputs[sample : sample + 1], targets[sample : sample + 1])
    assert (inputs >= 0).all() and ((targets >= 0) | (targets == IGNORE_INDEX)).all()
    everyone = np.arange(part.num_samples)
    counted = (targets != IGNORE_INDEX).sum(axis=1)
    assert np.array_equal(part.num_targets(everyone), counted)
    # A shorter row that holds the sample's length holds the same, less padding.
    lengths = part.lengths(everyone)[:, 0]
    assert ((targets != IGNORE_INDEX) <= (np.arange(seq_length) < lengths[:, None])).all()
    for sample in range(part.num_samples):
        short = np.full((2, 1, lengths[sample]), -7, dtype=np.int64)
        part.read(sample, *short)
        assert np.array_equal(short[0, 0], inputs[sample, : lengths[sample]])
        assert np.array_equal(short[1, 0], targets[sample, : lengths[sample]])
    return inputs, targets


def tokens_of(ranges: Ranges | None) -> list[int]:
    if ranges is None:
        return []
    return [
        token
        for start, end in zip(ranges.starts, ranges.ends, strict=True)
        for token in range(start, end)
    ]


# Split


@given(lengths, st.floats(0, 0.5), st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_each_token_is_in_exactly_one_part(lengths: list[int], fraction: float, seed: int):
    store = store_of(lengths)
    training, validation = split_store(store, fraction, seed)
    assert sorted(tokens_of(training) + tokens_of(validation)) == list(range(sum(lengths)))
    assert tokens_of(training)
    if len(lengths) > 1 and fraction > 0:
        assert validation is not None
        held_out = len(validation.starts)
        assert held_out == min(max(round(fraction * len(lengths)), 1), len(lengths) - 1)
        assert set(validation.ends) <= set(store.document_ends)
    again = split_store(store, fraction, seed)
    assert tokens_of(again[0]) == tokens_of(training)


def test_the_split_depends_on_the_seed():
    parts = {tuple(tokens_of(split_store(store_of([5] * 40), 0.25, seed)[1])) for seed in range(9)}
    assert len(parts) == 9


def test_the_tail_of_a_single_document_is_held_out():
    training, validation = split_store(store_of([100]), 0.1, seed=0)
    assert tokens_of(training) == list(range(90))
    assert tokens_of(validation) == list(range(90, 100))


@given(lengths, st.floats(0.01, 0.5))
@settings(max_examples=50, deadline=None)
def test_joined_ranges_hold_the_same_tokens(lengths: list[int], fraction: float):
    for ranges in split_store(store_of(lengths), fraction, 0):
        if ranges is not None:
            joined = ranges.joined()
            assert tokens_of(joined) == tokens_of(ranges)
            assert (joined.starts[1:] > joined.ends[:-1]).all()


# Packed


@given(lengths, st.integers(2, 50), st.floats(0, 0.5))
@settings(max_examples=100, deadline=None)
def test_packed_samples_are_the_stream(lengths: list[int], seq_length: int, fraction: float):
    store = store_of(lengths)
    for ranges in split_store(store, fraction, seed=1):
        stream = np.array(tokens_of(ranges))
        if ranges is None or len(stream) <= seq_length:
            continue
        part = packed(store, ranges, seq_length)
        inputs, targets = read_all(part, seq_length)
        assert part.num_samples == (len(stream) - 1) // seq_length
        used = part.num_samples * seq_length
        assert np.array_equal(inputs.ravel(), stream[:used])
        assert np.array_equal(targets.ravel(), stream[1 : used + 1])


@given(st.integers(2, 20), st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_a_short_stream_is_one_padded_sample(num_tokens: int, seq_length: int):
    if num_tokens > seq_length:
        return
    store = store_of([1] * num_tokens)
    part = packed(store, everything(store), seq_length)
    inputs, targets = read_all(part, seq_length)
    assert part.num_samples == 1
    assert inputs[0, : num_tokens - 1].tolist() == list(range(num_tokens - 1))
    assert (inputs[0, num_tokens - 1 :] == END).all()
    assert targets[0, : num_tokens - 1].tolist() == list(range(1, num_tokens))
    assert (targets[0, num_tokens - 1 :] == IGNORE_INDEX).all()


def test_a_single_token_is_no_sample():
    store = store_of([1])
    assert packed(store, everything(store), 4).num_samples == 0
    assert cut(store, everything(store), 4).num_samples == 0


# One document a sample


@given(lengths, st.integers(2, 17))
@settings(max_examples=100, deadline=None)
def test_each_token_but_a_documents_first_is_a_target_once(lengths: list[int], seq_length: int):
    store = store_of(lengths)
    part = cut(store, everything(store), seq_length)
    if part.num_samples == 0:
        assert max(lengths) == 1
        return
    inputs, targets = read_all(part, seq_length)
    firsts = np.cumsum(lengths) - lengths
    expected = sorted(set(range(sum(lengths))) - set(firsts.tolist()))
    trained = targets != IGNORE_INDEX
    assert targets[trained].tolist() == expected
    assert np.array_equal(inputs[trained], targets[trained] - 1)
    # Nothing is trained behind padding, and no sample holds two documents.
    assert (np.diff(trained.astype(int), axis=1) <= 0).all()
    documents = np.searchsorted(store.document_ends, targets, side="right")
    for row in range(part.num_samples):
        assert len(set(documents[row, trained[row]].tolist())) == 1


# Fake


def test_fake_samples_depend_on_seed_and_index_alone():
    inputs, targets = read_all(FakeSamples(100, 64, seed=1, num_samples=50), 64)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.min() == 0 and inputs.max() == 99
    assert len({tuple(row) for row in inputs.tolist()}) == 50
    again, _ = read_all(FakeSamples(100, 64, seed=1, num_samples=50), 64)
    other, _ = read_all(FakeSamples(100, 64, seed=2, num_samples=50), 64)
    assert np.array_equal(inputs, again) and not np.array_equal(inputs, other)


def test_fake_pairs_begin_alike_and_train_on_the_rest():
    part = FakeSamples(100, 9, seed=1, num_samples=5, pairs=True)
    inputs, targets = np.zeros((2, 5, 2, 9), dtype=np.int64)
    for sample in range(5):
        part.read(sample, inputs[sample], targets[sample])
    assert part.rows_per_sample == 2 and np.array_equal(inputs[:, 0, :5], inputs[:, 1, :5])
    assert (inputs[:, 0, 5:] != inputs[:, 1, 5:]).any(axis=1).all()
    assert (targets[:, :, :4] == IGNORE_INDEX).all() and (targets[:, :, 4:] >= 0).all()
    assert np.array_equal(targets[:, :, 4:-1], inputs[:, :, 5:])
    assert part.num_targets(np.arange(5)).tolist() == [10] * 5


# Dataset


@given(lengths, lengths, st.booleans(), st.booleans(), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_targets_are_counted_without_reading(
    first: list[int], second: list[int], packing: bool, weighted: bool, seed: int
):
    kind = packed if packing else cut
    stores = [store_of([*first, 2]), store_of([*second, 3])]
    parts = [kind(store, everything(store), 5) for store in stores]
    sizes = [part.num_samples for part in parts]
    order = SampleOrder(sizes, [1.0, 2.0] if weighted else None, seed)
    dataset = Dataset(parts, order, 5)
    ids = np.arange(2 * dataset.num_samples + 3)
    inputs, targets, _ = dataset.rows(ids)
    assert inputs.shape == targets.shape == (len(ids), 5) and inputs.dtype == np.int64
    assert dataset.num_targets(ids) == (targets != IGNORE_INDEX).sum()
    assert dataset.samples_per_epoch == dataset.num_samples == sum(sizes)
    assert dataset.vocab_size_needed == 1 + max(store.max_token_id for store in stores)

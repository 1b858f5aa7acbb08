"""Samples of a store: each token where it belongs, none lost, none mixed up, little padding."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data import builders
from isles.data.builders import Ranges
from isles.data.mix import split_samples
from isles.data.samples import FakeSamples, SampleTable
from isles.data.tokens.store import TokenStore
from isles.dist.batch import IGNORE_INDEX
from isles.errors import DataError
from tests.data import END, numbered

documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)
kinds = st.sampled_from(["text", "chat", "preference"])
ways = st.sampled_from(["truncate", "drop"])
hows = st.fixed_dictionaries({"packs": st.booleans(), "isolates": st.booleans(), "too_long": ways})
two = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20)


def tokens_of(ranges: Ranges | None) -> list[int]:
    pieces = zip(ranges.starts, ranges.ends, strict=True) if ranges else ()
    return [token for start, end in pieces for token in range(start, end)]


def read_all(part: SampleTable, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and positions, [samples, R, width]; they are as long as it says."""
    shape = (part.num_samples, part.rows_per_sample, width)
    inputs, targets = np.full((2, *shape), -7, dtype=np.int64)
    positions = np.tile(np.arange(width), (*shape[:2], 1))
    everyone = np.arange(part.num_samples)
    lengths = part.lengths(everyone)
    for sample in range(part.num_samples):
        part.read(sample, inputs[sample], targets[sample], positions[sample])
        # A shorter row that holds the sample's length holds the same, less padding.
        longest = lengths[sample].max()
        short = np.full((2, shape[1], longest), -7, dtype=np.int64)
        part.read(sample, *short)
        assert np.array_equal(short[0], inputs[sample, :, :longest])
        assert np.array_equal(short[1], targets[sample, :, :longest])
    assert (inputs >= 0).all() and ((targets >= 0) | (targets == IGNORE_INDEX)).all()
    counted = (targets != IGNORE_INDEX).sum(axis=(1, 2))
    assert np.array_equal(part.num_targets(everyone), counted)
    behind = np.arange(width) >= lengths[:, :, None]
    assert (inputs[behind] == END).all() and (targets[behind] == IGNORE_INDEX).all()
    assert part.counts.used == lengths.sum()
    return inputs, targets, positions


@given(documents, kinds, st.floats(0, 0.5), st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_each_token_is_trained_on_or_held_out(lengths, kind, fraction, seed):
    each = 2 if kind == "preference" else 1
    store = numbered(lengths * each, kind)
    training, validation = builders.split_store(store, fraction, seed)
    assert sorted(tokens_of(training) + tokens_of(validation)) == list(range(len(store.tokens)))
    assert tokens_of(training)
    assert tokens_of(builders.split_store(store, fraction, seed)[0]) == tokens_of(training)
    if fraction == 0 or (len(lengths) == 1 and kind != "text"):
        assert validation is None
    elif len(lengths) > 1:
        assert validation is not None
        held_out = np.searchsorted(store.document_ends, validation.ends)
        assert np.array_equal(store.document_ends[held_out], validation.ends)
        number = min(max(round(fraction * len(lengths)), 1), len(lengths) - 1)
        assert len(held_out) == each * number
        if each == 2:
            assert (held_out[0::2] % 2 == 0).all() and (held_out[1::2] == held_out[0::2] + 1).all()


@given(documents, st.integers(2, 50), st.floats(0, 0.5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_packed_text_is_one_stream(lengths, seq_length, fraction, isolated):
    """Also where parts are held out. Isolated, no document predicts the next."""
    store = numbered(lengths)
    for ranges in filter(None, builders.split_store(store, fraction, seed=1)):
        stream = np.array(tokens_of(ranges))
        part = builders.packed(store, ranges, seq_length, isolates=isolated)
        if len(stream) == 1:
            assert part.num_samples == 0
            continue
        assert part.num_samples == max((len(stream) - 1) // seq_length, 1)
        used = min(part.num_samples * seq_length, len(stream) - 1)
        inputs, targets, positions = (x[:, 0] for x in read_all(part, seq_length))
        assert np.array_equal(inputs.ravel()[:used], stream[:used])
        wanted = stream[1 : used + 1]
        if isolated:
            wanted = np.where(np.isin(wanted, ranges.starts), IGNORE_INDEX, wanted)
        assert np.array_equal(targets.ravel()[:used], wanted)
        places = np.arange(seq_length)
        begins = np.isin(inputs, ranges.starts) | (inputs == END)
        begins[:, 1:] &= (inputs != END)[:, 1:] | (inputs != END)[:, :-1]
        counted = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        assert np.array_equal(positions, counted if isolated else np.tile(places, (len(inputs), 1)))


@given(documents, st.integers(2, 17))
@settings(max_examples=100, deadline=None)
def test_each_token_but_a_documents_first_is_a_target_once(lengths, seq_length):
    store = numbered(lengths)
    part = builders.cut(store, Ranges.of(store), seq_length)
    if part.num_samples == 0:
        assert max(lengths) == 1
        return
    inputs, targets, _ = (x[:, 0] for x in read_all(part, seq_length))
    firsts = np.cumsum(lengths) - lengths
    trained = targets != IGNORE_INDEX
    assert targets[trained].tolist() == sorted({*range(sum(lengths))} - {*firsts.tolist()})
    assert np.array_equal(inputs[trained], targets[trained] - 1)
    owners = np.searchsorted(store.document_ends, targets, side="right")
    assert all(len({*row[some]}) == 1 for row, some in zip(owners, trained, strict=True))


def expected_targets(store: TokenStore, seq_length: int, too_long: str) -> list[int]:
    """What is trained on, from the documents themselves."""
    found: list[int] = []
    start = 0
    for end in store.document_ends.tolist():
        kept = range(start + 1, min(end, start + seq_length + 1))
        if too_long == "truncate" or end - start <= seq_length + 1:
            found += [i for i in kept if store.trained is None or store.trained[i]]
        start = end
    return found


@given(documents, st.integers(2, 45), hows, st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_whole_documents_train_on_what_is_marked_and_nothing_else(lengths, seq_length, how, seed):
    store = numbered(lengths, "chat", seed=seed)
    if seed == 0:  # as with train_on: all
        store = replace(store, trained=None)
    part = builders.whole(store, Ranges.of(store), seq_length, **how)
    expected = expected_targets(store, seq_length, how["too_long"])
    if part.num_samples == 0:
        assert not expected
        return
    inputs, targets, positions = (x[:, 0] for x in read_all(part, seq_length))
    trained = targets != IGNORE_INDEX
    assert trained.any(axis=1).all() and sorted(targets[trained].tolist()) == expected
    # A target follows its input in one document.
    assert np.array_equal(inputs[trained] + 1, targets[trained])
    # Positions count from the start of the document, or of the sample.
    firsts = np.concatenate([[0], store.document_ends[:-1]])
    used = inputs != END
    owner = np.searchsorted(store.document_ends, inputs, side="right")
    if how["packs"] and how["isolates"]:
        assert np.array_equal(positions[used], inputs[used] - firsts[owner[used]])
    else:
        assert (positions == np.arange(seq_length)).all()
    if not how["packs"]:
        assert all(len(set(o[u])) == 1 for o, u in zip(owner, used, strict=True))
    counts = part.counts
    assert counts.documents - counts.dropped == len(set(owner[used].tolist()))
    cut_off = sum(n > seq_length + 1 for n in lengths)
    if how["too_long"] == "drop":
        assert counts.too_long == cut_off and counts.truncated == 0
    else:
        assert counts.too_long == 0 and counts.truncated <= cut_off
    assert counts.padding_share == pytest.approx(1 - used.sum() / used.size)


@given(two, st.integers(2, 35), ways)
@settings(max_examples=100, deadline=None)
def test_pairs_stay_together(lengths, seq_length, too_long):
    store = numbered([n for pair in lengths for n in pair], "preference")
    part = builders.pairs(store, Ranges.of(store), seq_length, too_long=too_long)
    if part.num_samples == 0:
        return
    inputs, targets, positions = read_all(part, seq_length)
    assert (positions == np.arange(seq_length)).all()
    firsts = inputs[:, :, 0]
    starts = np.concatenate([[0], store.document_ends[:-1]])
    owners = np.searchsorted(starts, firsts)
    assert np.array_equal(starts[owners], firsts), "a row begins with its document"
    assert (owners[:, 0] % 2 == 0).all() and (owners[:, 1] == owners[:, 0] + 1).all()
    trained = targets != IGNORE_INDEX
    assert trained.any(axis=2).all() and np.array_equal(inputs[trained] + 1, targets[trained])
    if too_long == "drop":
        assert all(max(lengths[owner // 2]) <= seq_length + 1 for owner in owners[:, 0])


def test_packing_is_close_to_perfect_quick_and_always_the_same():
    """On lengths as chats have them: a million documents, hardly any padding."""
    lengths = np.random.default_rng(0).lognormal(np.log(300), 0.9, 10**6)
    sizes = np.clip(lengths.astype(np.int64), 1, 2048)
    start = time.process_time()
    _, ends = builders.best_fit(sizes, 2048)
    assert time.process_time() - start < 30, "it is not done in a loop over documents"
    assert 0 <= 1 - sizes.sum() / (2048 * len(ends)) < 0.001
    first, second = (builders.best_fit(sizes[:5000].copy(), 2048) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_fake_samples_depend_on_seed_and_index_alone_and_pairs_begin_alike():
    def read(seed: int, width: int = 64, **keys: Any) -> tuple[FakeSamples, np.ndarray, np.ndarray]:
        part = FakeSamples(100, width, seed=seed, num_samples=50, **keys)
        inputs, targets = np.full((2, 50, part.rows_per_sample, width), -7, dtype=np.int64)
        for sample in reversed(range(50)):
            part.read(sample, inputs[sample], targets[sample])
        return part, inputs, targets

    _, inputs, targets = read(1)
    assert np.array_equal(inputs[:, 0, 1:], targets[:, 0, :-1])
    assert inputs.min() == 0 and inputs.max() == 99
    assert len({tuple(row) for row in inputs[:, 0].tolist()}) == 50
    assert np.array_equal(inputs, read(1)[1]) and not np.array_equal(inputs, read(2)[1])
    part, inputs, targets = read(1, 9, pairs=True)
    assert part.rows_per_sample == 2 and np.array_equal(inputs[:, 0, :5], inputs[:, 1, :5])
    assert (inputs[:, 0, 5:] != inputs[:, 1, 5:]).any(axis=1).all()
    assert (targets[:, :, :4] == IGNORE_INDEX).all() and (targets[:, :, 4:] >= 0).all()
    assert np.array_equal(targets[:, :, 4:-1], inputs[:, :, 5:])
    assert part.num_targets(np.arange(5)).tolist() == [10] * 5


def section(**keys: object) -> DataConfig:
    keys = {"seq_length": 64, "validation_fraction": 0.0, **keys}
    return DataConfig.model_validate({"sources": [{"path": "x", "type": "chat"}], **keys})


def test_the_run_file_says_what_is_packed_and_kept_apart():
    found = {}
    for kind in ("chat", "text"):
        store = numbered([20] * 30, kind)
        source = SourceConfig.model_validate({"path": "x", "type": kind})
        for keys in ({}, {"packing": False}, {"isolate_documents": False}):
            part = builders.make_table(section(**keys), source, store, Ranges.of(store))
            how = part.content.split(":")[2]
            found[kind, *keys] = how, part.isolates, part.num_samples
    assert found == {
        ("chat",): ("packed", True, 10),
        ("chat", "packing"): ("single", False, 30),
        ("chat", "isolate_documents"): ("packed", False, 10),
        ("text",): ("packed", False, 9),
        ("text", "packing"): ("documents", False, 30),
        ("text", "isolate_documents"): ("packed", False, 9),
    }


def test_what_cannot_be_used_is_counted_and_named_and_nothing_at_all_is_an_error(caplog):
    store = numbered([10] * 30 + [200] * 4, "chat", share=1.0)
    assert store.trained is not None
    store.trained[:20] = False  # the first two documents
    data = section(too_long="drop")
    train, held_out = split_samples(data, data.sources[0], store, 0)
    assert held_out is None
    assert (train.counts.too_long, train.counts.untrained, train.counts.dropped) == (4, 2, 6)
    assert "6 of 34 documents are skipped: 4 longer than seq_length 64, 2 without" in caplog.text
    store = numbered([200] * 4, "chat")
    drops, cuts = section(too_long="drop"), section()
    with pytest.raises(
        DataError, match="none of the 4 documents can be trained on: 4 are longer"
    ) as e:
        split_samples(drops, drops.sources[0], store, 0)
    assert "data.too_long: truncate" in e.value.fix
    untrained = replace(store, trained=np.zeros(800, dtype=np.bool_))
    with pytest.raises(DataError, match="the first 64 tokens have no trained token"):
        split_samples(cuts, cuts.sources[0], untrained, 0)

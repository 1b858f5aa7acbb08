"""A run's data: the global order of samples, and the rows of each rank, one step ahead."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.config.sections.data import DataConfig
from isles.config.sections.training import Epochs, TrainingConfig, length_in_steps
from isles.data.builders import Ranges, packed, pairs, whole
from isles.data.loader import Loader, StepData, evaluation_batches
from isles.data.mix import Dataset, build_datasets, documents_for_tokenizer
from isles.data.order import PERIOD, SampleOrder, key_from, permute, shares
from isles.data.samples import FAKE_SAMPLES, FakeSamples, Samples
from isles.data.tokens.tokenizer import train_tokenizer
from isles.dist.batch import IGNORE_INDEX
from isles.dist.split import even_split
from isles.errors import DataError
from tests.data import END, numbered, quiet, write_rows
from tests.deadline import DEADLINE_S

CPU = torch.device("cpu")


def dataset_of(*parts: Samples, seq_length: int = 64, trims: bool = True) -> Dataset:
    order = SampleOrder([part.num_samples for part in parts], None, 0)
    return Dataset(parts, order, seq_length, trims=trims)


def chats(lengths: list[int], seq_length: int = 64, *, packs: bool = False) -> Samples:
    """Conversations of these lengths, of which nearly all is trained."""
    store = numbered(lengths, "chat", seed=1, share=0.95)
    how = {"packs": packs, "isolates": True}
    return whole(store, Ranges.of(store), seq_length, too_long="truncate", **how)


def loader_of(
    dataset: Dataset,
    size: int,
    micro: int,
    *,
    rank=0,
    ranks=1,
    device=CPU,
    in_step=False,
    **options,
):
    split = even_split(size, ranks, micro, in_step=in_step)
    return Loader(dataset, split=split, dp_rank=rank, device=device, **options)


@given(
    rows=st.integers(1, 12),
    passes=st.sampled_from([0.3, 1, 1.5, 2]),
    ranks=st.integers(1, 4),
    extra=st.integers(0, 12),
    micro=st.integers(1, 4),
    in_step=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_reads_each_sample_once(rows, passes, ranks, extra, micro, in_step):
    """By smaller steps at its end, whatever the ranks; some may have no row of these."""
    dataset, size = dataset_of(chats(list(range(3, 3 + rows)))), ranks + extra
    training = TrainingConfig(num_train_epochs=passes, global_batch_size=size)
    epochs = Epochs.of(training, dataset.samples_per_epoch)
    assert epochs is not None and epochs.end == max(1, round(passes * rows))
    cursor, read, batches = 0, list[int](), list[int]()
    loaders = [
        loader_of(dataset, size, micro, rank=r, ranks=ranks, in_step=in_step, epochs=epochs)
        for r in range(ranks)
    ]
    for step in range(length_in_steps(training, rows) or 0):
        assert length_in_steps(training, rows, step=step, cursor=cursor) == (
            length_in_steps(training, rows)
        )
        found = [loader.step(cursor) for loader in loaders]
        assert len({(f.next_sample, f.loss_divisor, f.global_tokens) for f in found}) == 1
        if in_step:
            assert len({len(f.micro_batches) for f in found}) == 1
        ids = [i for f in found for batch in f.micro_batches for i in batch.sample_ids]
        assert ids == list(range(cursor, found[0].next_sample))
        trained = sum(
            int((b.targets_BT != IGNORE_INDEX).sum()) for f in found for b in f.micro_batches
        )
        assert trained == found[0].loss_divisor, "a rank without rows trains on nothing"
        read += dataset.numbers(np.array(ids)).tolist()
        batches.append(len(ids))
        cursor = found[0].next_sample
    for loader in loaders:
        loader.close()
    assert cursor == epochs.end and max(batches) <= size
    for start in range(0, len(read), rows):
        epoch = read[start : start + rows]
        assert len(set(epoch)) == len(epoch)
    assert length_in_steps(training, rows, step=9, cursor=cursor) == 9
    # A run that an older isles began, whose cursor lies elsewhere, ends at the same sample.
    at, steps = 1, 0
    while more := epochs.batch_at(at):
        at, steps = at + more, steps + 1
    assert at == max(1, epochs.end) and steps == epochs.steps_from(1)


@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 5), st.integers(0, 300), st.booleans())
@settings(max_examples=60, deadline=None)
def test_ranks_share_the_same_global_batch(ranks, extra, micro, seen, packs):
    """So that a run goes on at its cursor on any number of ranks."""
    dataset, size = dataset_of(chats([*range(3, 60)] * 2, packs=packs)), ranks + extra
    steps: list[StepData] = []
    for rank in range(ranks):
        with closing(loader_of(dataset, size, micro, rank=rank, ranks=ranks)) as loader:
            steps.append(loader.step(seen))
    batches = [batch for step in steps for batch in step.micro_batches]
    ids = [i for batch in batches for i in batch.sample_ids]
    assert ids == list(range(seen, seen + size))
    targets = sum(int((batch.targets_BT != IGNORE_INDEX).sum()) for batch in batches)
    computed = sum(batch.input_ids_BT.numel() for batch in batches)
    read = sum(int((batch.input_ids_BT != END).sum()) for batch in batches)
    for step in steps:
        assert (step.first_sample, step.next_sample) == (seen, seen + size)
        assert step.global_tokens == step.loss_divisor == targets
        assert step.input_tokens == read
        assert step.padding_share == pytest.approx(1 - read / computed)
    for batch in batches:
        assert len(batch.sample_ids) == len(batch.input_ids_BT) <= micro
        rows = dataset.rows(np.array(batch.sample_ids))
        assert np.array_equal(batch.input_ids_BT.numpy(), rows.input_ids_BT)
        assert np.array_equal(batch.targets_BT.numpy(), rows.targets_BT)
        trained = (batch.targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
        if batch.places_N is None:
            assert len(trained) == batch.targets_BT.numel(), "there is nothing to choose"
        else:
            assert torch.equal(batch.places_N, trained)
        assert (batch.position_ids_BT is not None) == packs
        if batch.position_ids_BT is not None and batch.cu_seqlens_N is not None:
            begins = (batch.position_ids_BT.flatten() == 0).nonzero().flatten()
            assert batch.cu_seqlens_N.tolist() == [*begins.tolist(), batch.targets_BT.numel()]


def test_a_step_of_pairs_has_two_rows_each_and_counts_pairs():
    lengths = [n for i in range(20) for n in (5 + i, 25 - i)]
    store = numbered(lengths, "preference", share=0.9)
    dataset = dataset_of(pairs(store, Ranges.of(store), 32, too_long="truncate"), seq_length=32)
    with closing(loader_of(dataset, 6, 4)) as loader:
        step = loader.step(0)
    assert [len(batch.sample_ids) for batch in step.micro_batches] == [4, 2]
    assert [len(batch.input_ids_BT) for batch in step.micro_batches] == [8, 4]
    assert step.loss_divisor == 6
    targets = [int((batch.targets_BT != IGNORE_INDEX).sum()) for batch in step.micro_batches]
    assert step.global_tokens == sum(targets)
    batch = step.micro_batches[0]
    alone = batch.sample(2)
    assert torch.equal(alone.input_ids_BT, batch.input_ids_BT[4:6])
    assert alone.sample_ids == (batch.sample_ids[2],)


def test_rows_are_only_as_long_as_the_longest_of_a_batch():
    part = chats([*range(3, 60)])
    trimmed, fixed = (dataset_of(part, trims=trims) for trims in (True, False))
    for first in range(0, 50, 5):
        ids = np.arange(first, first + 5)
        rows, untrimmed = trimmed.rows(ids), fixed.rows(ids)
        longest = int(trimmed.lengths(ids).max())
        width = rows.targets_BT.shape[1]
        assert longest <= width < longest + 8 and width % 8 == 0
        assert np.array_equal(rows.input_ids_BT, untrimmed.input_ids_BT[:, :width])
        assert np.array_equal(rows.targets_BT, untrimmed.targets_BT[:, :width])
        assert (untrimmed.targets_BT[:, width:] == IGNORE_INDEX).all()
        assert untrimmed.targets_BT.shape[1] == 64


def test_text_beside_isolated_chats_gets_positions_too():
    text = numbered([30] * 20)
    stream = packed(text, Ranges.of(text), 16)
    dataset = dataset_of(stream, chats([6] * 39, 16, packs=True), seq_length=16)
    assert dataset.isolates
    positions = dataset.rows(np.arange(dataset.num_samples)).position_ids_BT
    assert positions is not None
    restarts = (positions == 0).sum(axis=1)
    assert set(restarts.tolist()) == {1, 4}, "text is one document a row; 3 chats and padding"


def test_the_next_step_is_read_in_the_background_and_so_are_its_errors():
    asked = threading.Event()

    class Broken(Dataset):
        def rows(self, sample_ids):
            if 6 in sample_ids:
                assert threading.current_thread() is not threading.main_thread()
                asked.set()
                raise OSError("the disk is gone")
            return super().rows(sample_ids)

    dataset = Broken([FakeSamples(9, 6, 0, 100)], SampleOrder([100], None, 0), 6)
    with closing(loader_of(dataset, 4, 2)) as loader:
        loader.step(0)
        assert asked.wait(DEADLINE_S)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                loader.step(4)
        assert loader.step(8).next_sample == 12


@given(st.integers(1, 5), st.integers(0, 30), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_evaluation_reads_each_sample_once(ranks, num_samples, micro):
    fake = dataset_of(FakeSamples(9, 6, 0, 20), seq_length=6)
    how = {"micro_batch_size": micro, "dp_size": ranks, "device": CPU}
    ids = [
        i
        for rank in range(ranks)
        for batch in evaluation_batches(fake, num_samples, dp_rank=rank, **how)
        for i in batch.sample_ids
    ]
    assert ids == list(range(min(num_samples, 20)))


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_on_the_cpu():
    dataset = dataset_of(chats([*range(3, 60)]))
    device = torch.device("cuda", 0)
    with (
        closing(loader_of(dataset, 8, 3, device=device)) as there,
        closing(loader_of(dataset, 8, 3)) as here,
    ):
        for seen in range(0, 80, 8):
            steps = there.step(seen).micro_batches, here.step(seen).micro_batches
            for gpu, cpu in zip(*steps, strict=True):
                assert gpu.input_ids_BT.device == device and gpu.sample_ids == cpu.sample_ids
                assert torch.equal(gpu.input_ids_BT.cpu(), cpu.input_ids_BT)
                assert torch.equal(gpu.targets_BT.cpu(), cpu.targets_BT)


sizes = st.lists(st.integers(1, 60), min_size=1, max_size=4)
seeds = st.integers(0, 2**63 - 1)


@given(st.integers(2**40, 2**62), seeds)
@settings(max_examples=20, deadline=None)
def test_permute_stays_inside_huge_ranges(n, seed):
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
def test_an_epoch_holds_every_sample_once(sizes, seed, epoch):
    order = SampleOrder(sizes, None, seed)
    total = order.samples_per_epoch
    source, sample = order.locate(np.arange(epoch * total, (epoch + 1) * total))
    seen = sorted(zip(source.tolist(), sample.tolist(), strict=True))
    assert seen == [(k, i) for k, size in enumerate(sizes) for i in range(size)]


@given(sizes, st.booleans(), seeds, st.data())
@settings(max_examples=15, deadline=None)
def test_a_sample_depends_on_its_index_alone(sizes, weighted, seed, data):
    weights = [float(i + 1) for i in range(len(sizes))] if weighted else None
    ids = np.array(data.draw(st.lists(st.integers(0, 3 * PERIOD), min_size=1, max_size=9)))
    together = SampleOrder(sizes, weights, seed).locate(ids)
    for place, sample_id in enumerate(ids):
        alone = SampleOrder(sizes, weights, seed).locate(np.array([sample_id]))
        assert (alone[0][0], alone[1][0]) == (together[0][place], together[1][place])


def test_every_epoch_has_an_order_of_its_own():
    _, sample = SampleOrder([500], None, seed=2).locate(np.arange(1000))
    assert not np.array_equal(sample[:500], sample[500:])
    # And so it is of each source, where these have weights.
    sizes = [700, 33_000]
    source, sample = SampleOrder(sizes, [1.0, 1.0], seed=9).locate(np.arange(3 * PERIOD))
    for k, size in enumerate(sizes):
        drawn = sample[source == k]
        epochs = drawn[: len(drawn) // size * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        assert len(np.unique(epochs, axis=0)) == len(epochs)


def test_a_period_holds_the_sources_in_proportion():
    order = SampleOrder([1000, 10, 50], [3.0, 1.0, 1e-9], seed=5)
    for period in (0, 4):
        source, _ = order.locate(np.arange(PERIOD) + period * PERIOD)
        assert np.bincount(source).tolist() == shares([3.0, 1.0, 1e-9], PERIOD)
    assert np.bincount(source)[2] == 1
    # And evenly within it, not one source after another.
    assert abs((source[:1000] == 0).mean() - 0.75) < 0.05
    # Streams too, of which nothing is skipped.
    source, number = SampleOrder(None, [3, 1], 7).locate(np.arange(3 * PERIOD))
    for k, share in enumerate((3 / 4, 1 / 4)):
        assert (number[source == k] == np.arange((source == k).sum())).all(), "in order, each once"
        assert (source[:PERIOD] == k).sum() == share * PERIOD


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30), st.integers(30, 5000))
@settings(max_examples=100, deadline=None)
def test_shares_add_up(weights, slots):
    dealt = shares(weights, slots)
    assert sum(dealt) == slots and min(dealt) >= 1
    for share, weight in zip(dealt, weights, strict=True):
        assert share < weight / sum(weights) * slots + 1 + 1e-6 or share == 1


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words, and some more words"], 260)


def build(data: DataConfig, tokenizer: Any, cache: Path, *, seed: int = 0, **keys: Any):
    return build_datasets(data, tokenizer, cache, seed=seed, progress=quiet, **keys)


def section(*sources: dict[str, Any], **keys: Any) -> DataConfig:
    return DataConfig.model_validate({"sources": sources, **keys})


def test_every_start_sees_the_same_mixed_by_weight_and_no_document_leaks(tokenizer, tmp_path):
    rows = [{"text": f"document {i}: " + "words " * (i % 7 + 1)} for i in range(100)]
    corpus = {"path": str(write_rows(tmp_path / "corpus.jsonl", rows))}
    data = section(corpus, seq_length=256, packing=False, validation_fraction=0.3)
    parts = build(data, tokenizer, tmp_path / "cache")
    other = build(data, tokenizer, tmp_path / "cache", seed=1)
    assert 0 < parts[0].vocab_size_needed <= 260
    texts = []
    for part in (*parts, *other):
        inputs, targets, _ = part.rows(np.arange(part.num_samples))
        is_target = targets != IGNORE_INDEX
        assert part.num_targets(np.arange(part.num_samples)) == is_target.sum()
        rows = [row[: some.sum()] for row, some in zip(inputs, is_target, strict=True)]
        texts.append({tokenizer.decode(row.tolist()).split(":")[0] for row in rows})
    assert len(texts[0]) == 70 and len(texts[1]) == 30 and not texts[0] & texts[1]
    assert texts[3] != texts[1], "another seed holds out others"
    first = parts[0].rows(np.arange(9))[0]
    again, _ = build(data, tokenizer, tmp_path / "cache")
    assert np.array_equal(again.rows(np.arange(9))[0], first)
    assert not np.array_equal(other[0].rows(np.arange(9))[0], first)
    whole = section(corpus, seq_length=16, validation_fraction=0.0)
    assert build(whole, tokenizer, tmp_path / "cache")[1] is None
    file = tmp_path / "other.txt"
    file.write_text("ZZZZZZZZ\n" * 2000)
    rare = {"path": str(file), "weight": 1.0}
    data = section({**corpus, "weight": 3.0}, rare, seq_length=16)
    z = tokenizer("Z")["input_ids"][0]
    for dataset in build(data, tokenizer, tmp_path / "cache"):
        inputs, _, _ = dataset.rows(np.arange(4000))
        assert abs((inputs == z).any(axis=1).mean() - 0.25) < 0.04


def test_too_little_text(tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("0123456789")
    short = {"path": str(file)}
    with pytest.raises(DataError, match="9 training tokens of 1 documents") as caught:
        build(section(short, seq_length=32), tokenizer, tmp_path / "cache")
    assert "data.seq_length to 8 or less" in caught.value.fix
    training, validation = build(section(short, seq_length=8), tokenizer, tmp_path / "cache")
    assert training.num_samples == 1 and validation is not None
    assert validation.num_targets(np.arange(1)) == 1


def test_fake_data_needs_no_tokenizer(tmp_path):
    data = section({"type": "fake"}, seq_length=8)
    training, validation = build(data, None, tmp_path / "cache", vocab_size=77)
    assert training.num_samples == training.samples_per_epoch == FAKE_SAMPLES
    assert validation is not None and validation.num_samples == round(0.02 * FAKE_SAMPLES)
    assert training.vocab_size_needed == 77
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="every source is fake"):
        next(documents_for_tokenizer(data))

"""Whole documents in samples: none lost, none mixed up, little padding."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.config.load import Loaded, load_run_file
from isles.config.rules import check_rules
from isles.config.rules.shape import check_shape
from isles.config.sections.data import DataConfig, SourceConfig, isolates
from isles.data.builders import Ranges, best_fit, make_table, packed, pairs, split_store, whole
from isles.data.loader import Loader
from isles.data.mix import Dataset, split_samples
from isles.data.order import SampleOrder
from isles.data.samples import Samples, SampleTable
from isles.data.tokens.store import TokenStore
from isles.dist.batch import IGNORE_INDEX, block_mask
from isles.dist.split import even_split
from isles.errors import ConfigErrors, DataError, UserError
from isles.models.attention import check_attention
from tests.each import each

END = 9999

documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)


class Numbered(TokenStore):
    """Tokens are their places, so that each is known again."""

    digest = "numbered"


def store_of(lengths: list[int], kind: str, seed: int = 0, share: float = 0.5) -> TokenStore:
    """Documents of these lengths, of which a share of the tokens is trained."""
    ends = np.cumsum(lengths)
    trained = np.random.default_rng(seed).random(int(ends[-1])) < share
    tokens = np.arange(ends[-1], dtype=np.uint32)
    return Numbered(Path("nowhere"), "counted", tokens, ends, END, int(ends[-1]) - 1, trained, kind)


def everything(store: TokenStore) -> Ranges:
    ends = np.asarray(store.document_ends)
    return Ranges(np.concatenate([[0], ends[:-1]]), ends)


def read_all(part: Samples, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and positions, [samples, R, width]."""
    shape = (part.num_samples, part.rows_per_sample, width)
    inputs, targets = np.full((2, *shape), -7, dtype=np.int64)
    positions = np.tile(np.arange(width), (*shape[:2], 1))
    for sample in range(part.num_samples):
        part.read(sample, inputs[sample], targets[sample], positions[sample])
    everyone = np.arange(part.num_samples)
    counted = (targets != IGNORE_INDEX).sum(axis=(1, 2))
    assert np.array_equal(part.num_targets(everyone), counted) and (counted > 0).all()
    assert (inputs >= 0).all() and ((targets >= 0) | (targets == IGNORE_INDEX)).all()
    lengths = part.lengths(everyone)
    behind = np.arange(width) >= lengths[:, :, None]
    assert (inputs[behind] == END).all() and (targets[behind] == IGNORE_INDEX).all()
    assert part.counts.used == lengths.sum() == (~behind).sum()
    return inputs, targets, positions


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


# Which documents share a sample


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_every_document_is_in_one_sample_that_holds_it(lengths: list[int], more: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    capacity = max(lengths, default=1) + more
    order, ends = best_fit(sizes, capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    pieces = np.split(order, ends[:-1]) if len(ends) else []
    for piece in pieces:
        assert len(piece) and sizes[piece].sum() <= capacity
        assert (np.diff(piece) > 0).all()
    # Two samples that fit into one would have been one: first fit or better leaves at most one
    # half empty.
    half_empty = [piece for piece in pieces if 2 * sizes[piece].sum() <= capacity]
    assert len(half_empty) <= 1


def test_packing_is_close_to_perfect_and_quick() -> None:
    """On lengths as chats have them: a million documents, hardly any padding."""
    lengths = np.random.default_rng(0).lognormal(np.log(300), 0.9, 10**6)
    sizes = np.clip(lengths.astype(np.int64), 1, 2048)
    start = time.process_time()
    _, ends = best_fit(sizes, 2048)
    assert time.process_time() - start < 30, "it is not done in a loop over documents"
    assert 1 - sizes.sum() / (2048 * len(ends)) < 0.001
    assert len(ends) >= -(-sizes.sum() // 2048)


def test_the_same_lengths_give_the_same_samples() -> None:
    sizes = np.random.default_rng(1).integers(1, 100, 5000)
    first, second = best_fit(sizes, 256), best_fit(sizes.copy(), 256)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# Whole documents


@given(
    documents,
    st.integers(2, 45),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["truncate", "drop"]),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_whole_documents_train_on_what_is_marked_and_nothing_else(
    lengths: list[int], seq_length: int, packs: bool, isolated: bool, too_long: str, seed: int
) -> None:
    store = store_of(lengths, "chat", seed)
    part = whole(
        store,
        everything(store),
        seq_length,
        packs=packs,
        isolates=isolated,
        too_long=too_long,  # type: ignore[arg-type]
    )
    expected = expected_targets(store, seq_length, too_long)
    if part.num_samples == 0:
        assert not expected
        return
    inputs, targets, positions = (x[:, 0] for x in read_all(part, seq_length))
    trained = targets != IGNORE_INDEX
    assert sorted(targets[trained].tolist()) == expected
    # A target follows its input in one document.
    assert np.array_equal(inputs[trained] + 1, targets[trained])
    # Positions count from the start of the document, or of the sample.
    firsts = np.concatenate([[0], store.document_ends[:-1]])
    used = inputs != END
    owner = np.searchsorted(store.document_ends, inputs, side="right")
    if packs and isolated:
        assert np.array_equal(positions[used], inputs[used] - firsts[owner[used]])
    else:
        assert (positions == np.arange(seq_length)).all()
    if not packs:
        assert all(len(set(o[u])) == 1 for o, u in zip(owner, used, strict=True))
    counts = part.counts
    assert counts.documents == len(lengths)
    assert counts.samples == part.num_samples
    in_samples = len(set(owner[used].tolist()))
    assert counts.documents - counts.dropped == in_samples
    cut_off = sum(n > seq_length + 1 for n in lengths)
    if too_long == "drop":
        assert counts.too_long == cut_off and counts.truncated == 0
    else:
        assert counts.too_long == 0 and counts.truncated <= cut_off
    places = counts.samples * seq_length
    assert counts.padding_share == pytest.approx(1 - used.sum() / places)


def test_a_document_that_fits_exactly_is_not_cut() -> None:
    store = replace(store_of([9, 10], "chat"), trained=None)
    part = whole(store, everything(store), 8, packs=True, isolates=True, too_long="truncate")
    inputs, targets, _ = read_all(part, 8)
    assert inputs[0, 0].tolist() == list(range(8)) and targets[0, 0].tolist() == list(range(1, 9))
    assert inputs[1, 0].tolist() == list(range(9, 17))
    assert part.counts.truncated == 1 and part.counts.padding_share == 0


def test_what_changes_the_samples_changes_the_content() -> None:
    store = store_of([5, 9, 3, 7, 30], "chat")
    ranges = everything(store)
    parts = [
        whole(store, ranges, length, packs=packs, isolates=apart, too_long=too_long)
        for length in (40, 41)
        for packs, apart in ((True, True), (True, False), (False, False))
        for too_long in ("truncate", "drop")
    ]
    text = replace(store, kind="text", trained=None)
    streams = [
        packed(text, ranges, length, isolates=apart) for length in (8, 9) for apart in (True, False)
    ]
    found = [part.content for part in (*parts, *streams)]
    assert len(set(found)) == len(found)


# Text that is kept apart


@given(documents, st.integers(2, 50))
@settings(max_examples=100, deadline=None)
def test_isolated_text_is_the_same_stream_without_targets_across_borders(
    lengths: list[int], seq_length: int
) -> None:
    store = replace(store_of(lengths, "text"), trained=None)
    ranges = everything(store)
    joined = packed(store, ranges, seq_length)
    apart = packed(store, ranges, seq_length, isolates=True)
    assert apart.num_samples == joined.num_samples
    firsts = set(np.asarray(store.document_ends)[:-1].tolist())
    for sample in range(joined.num_samples):
        usual, isolated = np.full((2, 2, 1, seq_length), -7, dtype=np.int64)
        positions = np.arange(seq_length)[None].copy()
        joined.read(sample, *usual)
        apart.read(sample, *isolated, positions)
        assert np.array_equal(usual[0], isolated[0])
        begins = 0
        for place in range(seq_length):
            token, target = int(usual[0, 0, place]), int(usual[1, 0, place])
            is_padding = target == IGNORE_INDEX
            if token in firsts or (is_padding and usual[1, 0, place - 1] != IGNORE_INDEX):
                begins = place
            assert positions[0, place] == place - begins
            crosses = target in firsts
            assert isolated[1, 0, place] == (IGNORE_INDEX if crosses else target)
        assert apart.num_targets(np.array([sample])) == (isolated[1] != IGNORE_INDEX).sum()


def test_the_mask_joins_a_token_to_the_earlier_ones_of_its_document() -> None:
    mask = block_mask(torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]))[:, 0].int()
    assert mask[0].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    assert torch.equal(mask[1], torch.ones(6, 6, dtype=torch.int32).tril())


# Pairs


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20),
    st.integers(2, 35),
    st.sampled_from(["truncate", "drop"]),
)
@settings(max_examples=100, deadline=None)
def test_pairs_stay_together(
    lengths: list[tuple[int, int]], seq_length: int, too_long: str
) -> None:
    store = store_of([n for pair in lengths for n in pair], "preference")
    part = pairs(
        store,
        everything(store),
        seq_length,
        too_long=too_long,  # type: ignore[arg-type]
    )
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


@given(st.integers(1, 30), st.floats(0.01, 0.5), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_pairs_are_held_out_together(num_pairs: int, fraction: float, seed: int) -> None:
    store = store_of([3, 4] * num_pairs, "preference")
    training, validation = split_store(store, fraction, seed)
    assert (validation is None) == (num_pairs == 1)
    for part in (training, validation):
        if part is not None:
            assert (part.starts[0::2] % 7 == 0).all()
            assert np.array_equal(part.starts[1::2], part.starts[0::2] + 3)


def test_the_end_of_a_single_conversation_is_not_held_out() -> None:
    training, validation = split_store(store_of([50], "chat"), 0.1, 0)
    assert validation is None and training.num_tokens == 50


# Datasets and steps


def dataset_of(*parts: Samples, seq_length: int, trims: bool = True) -> Dataset:
    order = SampleOrder([part.num_samples for part in parts], None, 0)
    return Dataset(parts, order, seq_length, trims=trims)


def chats(lengths: list[int], seq_length: int, *, packs: bool) -> SampleTable:
    store = store_of(lengths, "chat", seed=1, share=0.95)
    return whole(
        store, everything(store), seq_length, packs=packs, isolates=True, too_long="truncate"
    )


def test_rows_are_only_as_long_as_the_longest_of_a_batch() -> None:
    part = chats(list(range(3, 60)), 64, packs=False)
    trimmed, fixed = (dataset_of(part, seq_length=64, trims=trims) for trims in (True, False))
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


def test_text_beside_isolated_chats_gets_positions_too() -> None:
    text = replace(store_of([30] * 20, "text"), trained=None)
    stream = packed(text, everything(text), 16)
    dataset = dataset_of(stream, chats([6] * 39, 16, packs=True), seq_length=16)
    assert dataset.isolates
    positions = dataset.rows(np.arange(dataset.num_samples)).position_ids_BT
    assert positions is not None
    restarts = (positions == 0).sum(axis=1)
    assert set(restarts.tolist()) == {1, 4}, "text is one document a row; 3 chats and padding"


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_knows_its_targets_its_tokens_and_its_padding(packs: bool, ranks: int) -> None:
    part = chats(list(range(3, 60)) * 4, 64, packs=packs)
    dataset = dataset_of(part, seq_length=64)
    split = even_split(10, ranks, 3, in_step=False)
    steps = []
    for rank in range(ranks):
        loader = Loader(dataset, split=split, dp_rank=rank, device=torch.device("cpu"))
        steps.append(loader.step(20))
        loader.close()
    batches = [batch for step in steps for batch in step.micro_batches]
    targets = sum(int((batch.targets_BT != IGNORE_INDEX).sum()) for batch in batches)
    computed = sum(batch.input_ids_BT.numel() for batch in batches)
    read = sum(int((batch.input_ids_BT != END).sum()) for batch in batches)
    for step in steps:
        assert step.global_tokens == step.loss_divisor == targets
        assert step.input_tokens == read
        assert step.padding_share == pytest.approx(1 - read / computed)
    for batch in batches:
        flat = batch.targets_BT.flatten()
        assert batch.places_N is not None
        assert torch.equal(batch.places_N, (flat != IGNORE_INDEX).nonzero().flatten())
        assert (batch.position_ids_BT is not None) == packs
        if packs:
            assert batch.position_ids_BT is not None and batch.cu_seqlens_N is not None
            begins = (batch.position_ids_BT.flatten() == 0).nonzero().flatten()
            assert batch.cu_seqlens_N.tolist() == [*begins.tolist(), flat.numel()]


def test_a_step_of_pairs_has_two_rows_each_and_counts_pairs() -> None:
    store = store_of([n for i in range(20) for n in (5 + i, 25 - i)], "preference", share=0.9)
    part = pairs(store, everything(store), 32, too_long="truncate")
    dataset = dataset_of(part, seq_length=32)
    split = even_split(6, 1, 4, in_step=False)
    loader = Loader(dataset, split=split, dp_rank=0, device=torch.device("cpu"))
    step = loader.step(0)
    loader.close()
    assert [len(batch.sample_ids) for batch in step.micro_batches] == [4, 2]
    assert [len(batch.input_ids_BT) for batch in step.micro_batches] == [8, 4]
    assert step.loss_divisor == 6
    assert step.global_tokens == sum(
        int((batch.targets_BT != IGNORE_INDEX).sum()) for batch in step.micro_batches
    )
    batch = step.micro_batches[0]
    alone = batch.sample(2)
    assert torch.equal(alone.input_ids_BT, batch.input_ids_BT[4:6])
    assert alone.sample_ids == (batch.sample_ids[2],)


# From the run file


def section(**keys: object) -> DataConfig:
    return DataConfig.model_validate({"sources": [{"path": "x", "type": "chat"}], **keys})


def test_the_run_file_says_what_is_packed_and_kept_apart() -> None:
    chat = store_of([20] * 30, "chat")
    text = replace(chat, kind="text", trained=None)
    found = {}
    for name, store in (("chat", chat), ("text", text)):
        source = SourceConfig.model_validate({"path": "x", "type": name})
        for keys in ({}, {"packing": False}, {"isolate_documents": False}):
            data = section(seq_length=64, **keys)
            part = make_table(data, source, store, everything(store))
            assert part.isolates == isolates(data, source)
            how = part.content.split(":")[2]
            found[name, *keys] = how, part.isolates, part.num_samples
    assert found == {
        ("chat",): ("packed", True, 10),
        ("chat", "packing"): ("single", False, 30),
        ("chat", "isolate_documents"): ("packed", False, 10),
        ("text",): ("packed", False, 9),
        ("text", "packing"): ("documents", False, 30),
        ("text", "isolate_documents"): ("packed", False, 9),
    }


def test_what_cannot_be_used_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    store = store_of([10] * 30 + [200] * 4, "chat", share=1.0)
    assert store.trained is not None
    store.trained[:20] = False  # the first two documents
    data = section(seq_length=64, too_long="drop", validation_fraction=0.0)
    train, held_out = split_samples(data, data.sources[0], store, 0)
    assert held_out is None
    assert (train.counts.too_long, train.counts.untrained, train.counts.dropped) == (4, 2, 6)
    assert "6 of 34 documents are left out: 4 longer than seq_length 64, 2 without" in caplog.text


def test_nothing_to_train_on_is_an_error() -> None:
    store = store_of([200] * 4, "chat")
    drops = section(seq_length=64, too_long="drop", validation_fraction=0.0)
    with pytest.raises(DataError, match="none of 4 documents can be trained on: 4 are longer") as e:
        split_samples(drops, drops.sources[0], store, 0)
    assert "data.too_long: truncate" in e.value.fix
    untrained = replace(store, trained=np.zeros(800, dtype=np.bool_))
    cuts = section(seq_length=64, validation_fraction=0.0)
    with pytest.raises(DataError, match="no token that is trained lies in the first 64 tokens"):
        split_samples(cuts, cuts.sources[0], untrained, 0)


RUN = """\
model: {name_or_path: some/model}
tokenizer: {name_or_path: some/tokenizer}
data:
  sources:
    - {path: a, type: chat}
training: {max_steps: 100}
"""
CHAT = "data.sources=[{path: a, type: chat}]"
TEXT = "data.sources=[{path: a}]"
PAIRS = "data.sources=[{path: a, type: preference}]"


def load(tmp_path: Path, *overrides: str) -> Loaded:
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    return load_run_file(tmp_path / "run.yaml", overrides)


@each(
    ("overrides", "what", "fix"),
    [
        (
            ["data.packing=false", "data.isolate_documents=true"],
            "isolate_documents true means nothing to packing false",
            "packing: true",
        ),
        ([TEXT, "data.too_long=drop"], "too_long drop means nothing to text", "delete it"),
        (
            ["strategy={kind: fsdp, pp_size: 2, cp_size: 2}"],
            "stages of a pipeline (pp_size 2) are told of documents",
            "data.packing: false",
        ),
        (
            ["strategy={kind: ddp, pp_size: 2}", "model.attn_implementation=flash_attention_2"],
            "flash_attention_2 must be told where each document ends",
            "attn_implementation: sdpa",
        ),
        ([PAIRS], "method causal_lm does not read a preference source", "method: dpo"),
        (["training.method=dpo"], "a chat source has one", "type: preference"),
    ],
)
def test_rules_about_packing(tmp_path: Path, overrides: list[str], what: str, fix: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, *overrides)
    assert any(what in error.what and fix in error.fix for error in caught.value.issues)


@each(
    "overrides",
    [
        [],
        [TEXT, "data.isolate_documents=true"],
        [CHAT, "data.isolate_documents=false", "strategy={kind: fsdp, pp_size: 2, cp_size: 2}"],
        [CHAT, "data.packing=false", "strategy={kind: fsdp, pp_size: 2, cp_size: 2}"],
        [PAIRS, "training.method=dpo", "data.too_long=drop"],
        ["data.sources=[{type: fake}]", "training.method=dpo"],
    ],
)
def test_what_goes_together_is_let_through(tmp_path: Path, overrides: list[str]) -> None:
    assert check_rules(load(tmp_path, *overrides).config) == []


@each(
    ("kind", "overrides", "what"),
    [
        ("mamba", [], "by model_type mamba: its layers carry a state from token to token"),
        ("bloom", [], "by model_type bloom: it takes no positions"),
        ("their_own", [TEXT, "data.isolate_documents=true"], "kept apart by model_type their_own"),
        ("opt", ["model.attn_implementation=flex_attention"], "flex_attention does not keep"),
        (
            "gptj",
            ["model.attn_implementation=flash_attention_2"],
            "flash_attention_2 does not keep",
        ),
        ("mamba", ["data.packing=false"], None),
        ("mamba", ["data.isolate_documents=false"], None),
        ("mamba", [TEXT], None),
        ("llama", [], None),
        ("opt", [], None),
    ],
)
def test_models_that_do_not_heed_borders_are_refused(
    tmp_path: Path, kind: str, overrides: list[str], what: str | None
) -> None:
    found = check_shape(load(tmp_path, *overrides).config, {"model_type": kind})
    if what is None:
        assert not found
    else:
        (violation,) = found
        assert what in violation.what and "data.packing: false" in violation.fix


@each("name", ["flash_attention_2", "flex_attention"])
def test_attention_for_gpus_is_refused_without_one(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} trains on a GPU only") as caught:
        check_attention(name, torch.device("cpu"))
    assert "attn_implementation: sdpa" in caught.value.fix
    for other in ("sdpa", "eager"):
        check_attention(other, torch.device("cpu"))

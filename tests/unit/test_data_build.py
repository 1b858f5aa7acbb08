"""A run's data, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.mix import build_datasets, documents_for_tokenizer
from isles.data.samples import FAKE_SAMPLES
from isles.data.tokens.tokenizer import train_tokenizer
from isles.dist.batch import IGNORE_INDEX
from isles.errors import DataError
from tests.data import quiet, write_rows


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["some words, and some more words"], 260)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [{"text": f"document {i}: " + "words " * (i % 7 + 1)} for i in range(100)]
    return write_rows(tmp_path / "corpus.jsonl", rows)


def build(data: DataConfig, tokenizer: Any, cache: Path, *, seed: int = 0, **keys: Any):
    return build_datasets(data, tokenizer, cache, seed=seed, progress=quiet, **keys)


def section(*paths: Path, weights: tuple[float, ...] | None = None, **keys: Any):
    sources = tuple(
        SourceConfig(path=str(path), weight=weights[i] if weights else None)
        for i, path in enumerate(paths)
    )
    return DataConfig(sources=sources, **keys)


def test_every_start_sees_the_same_and_no_document_leaks(tokenizer, corpus: Path, tmp_path: Path):
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


def test_sources_are_mixed_by_weight(tokenizer, corpus: Path, tmp_path: Path):
    other = tmp_path / "other.txt"
    other.write_text("ZZZZZZZZ\n" * 2000)
    data = section(corpus, other, weights=(3.0, 1.0), seq_length=16)
    z = tokenizer("Z")["input_ids"][0]
    for dataset in build(data, tokenizer, tmp_path / "cache"):
        inputs, _, _ = dataset.rows(np.arange(4000))
        assert abs((inputs == z).any(axis=1).mean() - 0.25) < 0.04


def test_too_little_text(tokenizer, tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("0123456789")
    with pytest.raises(DataError, match="9 training tokens of 1 documents") as caught:
        build(section(file, seq_length=32), tokenizer, tmp_path / "cache")
    assert "data.seq_length to 8 or less" in caught.value.fix
    training, validation = build(section(file, seq_length=8), tokenizer, tmp_path / "cache")
    assert training.num_samples == 1 and validation is not None
    assert validation.num_targets(np.arange(1)) == 1


def test_fake_data_needs_no_tokenizer(tmp_path: Path):
    data = DataConfig(sources=(SourceConfig(type="fake"),), seq_length=8)
    training, validation = build(data, None, tmp_path / "cache", vocab_size=77)
    assert training.num_samples == training.samples_per_epoch == FAKE_SAMPLES
    assert validation is not None and validation.num_samples == round(0.02 * FAKE_SAMPLES)
    assert training.vocab_size_needed == 77
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="every source is fake"):
        next(documents_for_tokenizer(data))


def test_text_for_a_tokenizer_comes_from_all_sources_in_turn(corpus: Path, tmp_path: Path):
    (tmp_path / "b.txt").write_text("the other")
    texts = list(documents_for_tokenizer(section(corpus, tmp_path / "b.txt")))
    assert len(texts) == 101 and texts[1] == "the other" and texts[2].startswith("document 1:")

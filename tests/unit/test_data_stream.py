"""Streams: segments that lose no token, each made again exactly from the one before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.config.sections.data import DataConfig
from isles.data.stream import segments as stream_segments
from isles.data.stream.segments import HoldOut, SegmentRecord, Stream, make_segment, segment_table
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from tests.data import write_parquet, write_rows
from tests.each import each

TEXTS = [f"document {i} " + "word " * (i * 7919 % 60) for i in range(700)]
ROWS = [{"text": text} for text in TEXTS]

Made = list[tuple[SegmentRecord, TokenStore]]


@pytest.fixture
def tokenizer() -> Any:
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few thousand tokens."""
    monkeypatch.setattr(stream_segments, "SEGMENT_TOKENS", 6000)


def stream_of(path: Path, tokenizer: Any, **keys: Any) -> Stream:
    data = {"sources": [{"path": str(path)}], "seq_length": 32, "streaming": True, **keys}
    return Stream(DataConfig.model_validate(data), 0, tokenizer, 5)


def segments(stream: Stream, folder: Path, count: int, before: SegmentRecord | None = None) -> Made:
    """The next segments of a stream."""
    made: Made = []
    folder.mkdir(exist_ok=True)
    for _ in range(count):
        number = before.number + 1 if before else 0
        before = make_segment(stream, before, folder / str(number))
        made.append((before, TokenStore.open(folder / str(number))))
    return made


def tokens_read(stream: Stream, made: Made) -> list[int]:
    """Targets of all samples in order, with the first input before them."""
    tokens: list[int] = []
    for record, store in made:
        samples = segment_table(stream.data, stream.config, store, record.begin)
        assert samples.num_samples == record.num_samples
        for sample in range(record.num_samples):
            inputs, targets = np.empty((1, 32), np.int64), np.empty((1, 32), np.int64)
            samples.read(sample, inputs, targets)
            tokens += (inputs[0, :1].tolist() if not tokens else []) + targets[0].tolist()
    return tokens


@each(("name", "packing"), [("a.jsonl", True), ("a.parquet", True), ("a.jsonl", False)])
def test_segments_follow_on_without_losing_a_token(
    tmp_path: Path, tokenizer: Any, name: str, packing: bool
):
    write_rows(tmp_path / "a.jsonl", ROWS)
    write_parquet(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=300)
    stream = stream_of(tmp_path / name, tokenizer, validation_fraction=0.1, packing=packing)
    held_out = stream.hold_out(0, len(TEXTS))
    assert 0.05 < sum(held_out) / len(TEXTS) < 0.15
    kept = [text for text, held in zip(TEXTS, held_out, strict=True) if not held]
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in kept]
    epoch = [token for document in ids for token in document]
    made = segments(stream, tmp_path / "one", 20)
    if packing:
        tokens = tokens_read(stream, made)
    else:  # whole documents
        tokens = [token for _, store in made for token in store.tokens.tolist()]
    assert len(tokens) > 2 * len(epoch)
    assert tokens == (epoch * (len(tokens) // len(epoch) + 1))[: len(tokens)]
    assert made[-1][0].begin.epoch >= 2
    starts = [record.first_sample for record, _ in made]
    assert starts == [0, *np.cumsum([record.num_samples for record, _ in made]).tolist()][:-1]


def test_a_stream_reads_nothing_of_what_came_before(tmp_path: Path, tokenizer: Any):
    """Any segment is made again from the record of the one before it, even where the first files,
    which are read, are gone."""
    for part in range(4):
        write_rows(tmp_path / f"part-{part}.jsonl", ROWS[part::4])
    parts = tmp_path / "part-*.jsonl"
    made = segments(stream_of(parts, tokenizer), tmp_path / "one", 8)
    at = next(n for n, (r, _) in enumerate(made) if (r.begin.chunk_start or {}).get("file") == 2)
    later = stream_of(parts, tokenizer)
    (tmp_path / "part-0.jsonl").write_text("not what it was")
    before = SegmentRecord.from_record(json.loads(json.dumps(made[at - 1][0].record())))
    ((again, _),) = segments(later, tmp_path / "two", 1, before)
    assert again == made[at][0]


@each("content", ["", '{"text": " "}\n' * 10])
def test_nothing_to_train_on_is_an_error(tmp_path: Path, tokenizer: Any, content: str):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="no document to train on"):
        segments(stream_of(path, tokenizer), tmp_path / "one", 1)


def test_what_is_held_out_depends_on_seed_and_number_alone():
    whole = HoldOut(0.1, 3, 0)(0, 1000)
    parts = [HoldOut(0.1, 3, 0)(first, 250) for first in range(0, 1000, 250)]
    assert [held for part in parts for held in part] == whole
    assert HoldOut(0.1, 4, 0)(0, 1000) != whole != HoldOut(0.1, 3, 1)(0, 1000)
    assert not any(HoldOut(0.0, 3, 0)(0, 1000))

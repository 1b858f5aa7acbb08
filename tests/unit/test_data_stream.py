"""Streams: rows from any place on, segments made again exactly, the order of samples."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.config.load import load_run_file
from isles.config.sections.data import DataConfig
from isles.data.order import SampleOrder
from isles.data.sources.find import HubStream, open_source
from isles.data.sources.parse import TextParser
from isles.data.sources.read import file_chunks
from isles.data.sources.rows import Row
from isles.data.stream import segments as stream_segments
from isles.data.stream.segments import HoldOut, SegmentRecord, Stream, make_segment, segment_table
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import ConfigErrors, DataError
from tests.each import each

TEXTS = [f"document {i} " + "word " * (i * 7919 % 60) for i in range(700)]


def as_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def as_gzip(path: Path) -> Path:
    path.write_bytes(gzip.compress(as_jsonl(path.with_name("plain.jsonl")).read_bytes()))
    return path


def as_array(path: Path) -> Path:
    path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    return path


def as_csv(path: Path) -> Path:
    path.write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS))
    return path


def as_parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=300)
    return path


MAKERS = {
    "a.jsonl": as_jsonl,
    "a.jsonl.gz": as_gzip,
    "a.json": as_array,
    "a.csv": as_csv,
    "a.parquet": as_parquet,
}


def texts_of(rows: list[Any]) -> list[str]:
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.columns.get("text", row.columns.get("")) for row in rows]


@each("name", MAKERS)
def test_a_file_is_read_on_from_any_place(tmp_path: Path, name: str):
    path = MAKERS[name](tmp_path / name)
    parser = TextParser("text")
    chunks = list(file_chunks(path, parser, {}))
    assert len(chunks) >= 3
    assert [text for chunk in chunks for text in texts_of(chunk.rows)] == TEXTS
    for number, chunk in enumerate(chunks):
        assert list(file_chunks(path, parser, chunk.begin)) == chunks[number:]
    assert list(file_chunks(path, parser, chunks[-1].end)) == []
    assert [chunk.end for chunk in chunks[:-1]] == [chunk.begin for chunk in chunks[1:]]


def test_a_long_text_file_is_read_on_from_any_piece(tmp_path: Path, monkeypatch):
    from isles.data.sources import read

    monkeypatch.setattr(read, "WHOLE_BYTES", 2000)
    monkeypatch.setattr(read, "PIECE_BYTES", 700)
    path = tmp_path / "a.txt"
    path.write_text("\n".join(TEXTS[:100]) + "ä" * 900)
    parser = TextParser("text")
    chunks = list(file_chunks(path, parser, {}))
    assert len(chunks) > 10
    assert "".join(text for chunk in chunks for text in texts_of(chunk.rows)) == path.read_text()
    for number, chunk in enumerate(chunks):
        assert list(file_chunks(path, parser, chunk.begin)) == chunks[number:]


@pytest.fixture
def tokenizer() -> Any:
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few thousand tokens."""
    monkeypatch.setattr(stream_segments, "SEGMENT_TOKENS", 6000)


def stream_of(path: Path, tokenizer: Any, **keys: Any) -> Stream:
    data = {"sources": [{"path": str(path)}], "seq_length": 32, "streaming": True, **keys}
    return Stream(DataConfig.model_validate(data), 0, tokenizer, 5)


def segments(
    stream: Stream, folder: Path, count: int, before: SegmentRecord | None = None
) -> list[tuple[SegmentRecord, TokenStore]]:
    """The next segments of a stream."""
    made = []
    folder.mkdir(exist_ok=True)
    for _ in range(count):
        number = before.number + 1 if before else 0
        before = make_segment(stream, before, folder / str(number))
        made.append((before, TokenStore.open(folder / str(number))))
    return made


def tokens_read(stream: Stream, made: list[tuple[SegmentRecord, TokenStore]]) -> list[int]:
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


@pytest.mark.usefixtures("small")
@each("name", ["a.jsonl", "a.parquet"])
def test_segments_follow_on_without_losing_a_token(tmp_path: Path, tokenizer: Any, name: str):
    stream = stream_of(MAKERS[name](tmp_path / name), tokenizer, validation_fraction=0.1)
    held_out = stream.hold_out(0, len(TEXTS))
    assert 0.05 < sum(held_out) / len(TEXTS) < 0.15
    kept = [text for text, held in zip(TEXTS, held_out, strict=True) if not held]
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in kept]
    epoch = [token for document in ids for token in document]
    made = segments(stream, tmp_path / "one", 20)
    read = tokens_read(stream, made)
    assert len(read) > 2 * len(epoch)
    assert read == (epoch * (len(read) // len(epoch) + 1))[: len(read)]
    assert made[-1][0].begin.epoch >= 2
    starts = [record.first_sample for record, _ in made]
    assert starts == [0, *np.cumsum([record.num_samples for record, _ in made]).tolist()][:-1]


@pytest.mark.usefixtures("small")
@each("packing", [True, False])
def test_any_segment_is_made_again_from_the_record_before_it(
    tmp_path: Path, tokenizer: Any, packing: bool
):
    path = as_jsonl(tmp_path / "a.jsonl")
    first = segments(stream_of(path, tokenizer, packing=packing), tmp_path / "one", 15)
    for number in (3, 14):
        before = SegmentRecord.from_record(json.loads(json.dumps(first[number - 1][0].record())))
        again = stream_of(path, tokenizer, packing=packing)
        ((record, _),) = segments(again, tmp_path / f"from-{number}", 1, before)
        assert record == first[number][0]


@pytest.mark.usefixtures("small")
def test_a_stream_reads_nothing_of_what_came_before(tmp_path: Path, tokenizer: Any):
    """The first files may even be gone, once they are read."""
    (tmp_path / "data").mkdir()
    for part in range(4):
        lines = [json.dumps({"text": text}) for text in TEXTS[part::4]]
        (tmp_path / "data" / f"{part}.jsonl").write_text("\n".join(lines))
    stream = stream_of(tmp_path / "data" / "*.jsonl", tokenizer)
    made = segments(stream, tmp_path / "one", 8)
    at = next(n for n, (r, _) in enumerate(made) if (r.begin.chunk_start or {}).get("file") == 2)
    anchored = stream_of(tmp_path / "data" / "*.jsonl", tokenizer)
    (tmp_path / "data" / "0.jsonl").write_text("not what it was")
    ((again, _),) = segments(anchored, tmp_path / "two", 1, made[at - 1][0])
    assert again == made[at][0]


def test_nothing_to_train_on_is_said(tmp_path: Path, tokenizer: Any):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text": " "}\n' * 10)
    with pytest.raises(DataError, match="no document to train on"):
        segments(stream_of(path, tokenizer), tmp_path / "one", 1)
    path.write_text("")
    with pytest.raises(DataError, match="no document to train on"):
        segments(stream_of(path, tokenizer), tmp_path / "two", 1)


def test_hub_datasets_are_read_on_from_the_librarys_state(tmp_path: Path):
    import datasets

    files = []
    for part in range(3):
        files.append(str(tmp_path / f"{part}.jsonl"))
        lines = [json.dumps({"text": text}) for text in TEXTS[part * 240 : part * 240 + 240]]
        Path(files[-1]).write_text("\n".join(lines))
    builder = datasets.load_dataset_builder(
        "json", data_files=files, cache_dir=str(tmp_path / "cache")
    )
    rows, columns = HubStream("three files", builder, "train"), TextParser("text")
    chunks = list(rows.chunks(columns))
    assert [text for chunk in chunks for text in texts_of(chunk.rows)] == TEXTS
    for number, chunk in enumerate(chunks):
        chunk_start = json.loads(json.dumps(chunk.begin))
        following = next(iter(rows.chunks(columns, chunk_start)))
        assert (following.begin, following.rows) == (chunk.begin, chunk.rows), number
    assert list(rows.chunks(columns, chunks[-1].end)) == []


def test_saved_datasets_are_read_on_from_any_row(tmp_path: Path):
    import datasets

    from isles.config.sections.data import SourceConfig

    datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))}).save_to_disk(
        str(tmp_path / "saved")
    )
    source = SourceConfig.model_validate({"path": str(tmp_path / "saved")})
    rows, columns = open_source(source, streams=True), TextParser("text")
    chunks = list(rows.chunks(columns))
    assert [text for chunk in chunks for text in texts_of(chunk.rows)] == TEXTS
    assert list(rows.chunks(columns, chunks[2].begin)) == chunks[2:]
    assert list(rows.chunks(columns, chunks[-1].end)) == []


def test_weights_are_exact_and_nothing_is_skipped():
    order = SampleOrder(None, [3, 1], 7)
    ids = np.arange(3 * 65_536)
    source, number = order.locate(ids)
    for k, share in enumerate((3 / 4, 1 / 4)):
        assert (number[source == k] == np.arange((source == k).sum())).all(), "in order, each once"
        assert (source[:65_536] == k).sum() == share * 65_536


def test_what_is_held_out_depends_on_seed_and_number_alone():
    whole = HoldOut(0.1, 3, 0)(0, 1000)
    assert [
        held for first in range(0, 1000, 250) for held in HoldOut(0.1, 3, 0)(first, 250)
    ] == whole
    assert HoldOut(0.1, 4, 0)(0, 1000) != whole != HoldOut(0.1, 3, 1)(0, 1000)
    assert not any(HoldOut(0.0, 3, 0)(0, 1000))
    assert list(islice(whole, 3)) == HoldOut(0.1, 3, 0)(0, 3)


@each(
    ("overrides", "what", "fix"),
    [
        (
            ["training.max_steps=null", "training.num_train_epochs=2"],
            "num_train_epochs 2",
            "max_st",
        ),
        (["data.sources=[{path: a}, {path: b}]"], "of 2 sources", "weight: 1 for each"),
        (["data.sources=[{type: fake}]", "tokenizer={}"], "nothing to stream", "delete"),
        (["training.method=dpo", "data.sources=[{path: a, type: preference}]"], "dpo", "delete"),
    ],
)
def test_what_a_stream_does_not_go_with_is_said(
    tmp_path: Path, overrides: list[str], what: str, fix: str
):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name_or_path: gpt2}\n"
        "data: {sources: [{path: a}], streaming: true}\n"
        "training: {max_steps: 100}\n"
    )
    load_run_file(file)
    with pytest.raises(ConfigErrors) as errors:
        load_run_file(file, overrides)
    assert what in str(errors.value) and fix in str(errors.value)
    weighted = ["data.sources=[{path: a, weight: 1}, {path: b, weight: 2}]"]
    load_run_file(file, weighted)

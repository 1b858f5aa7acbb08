"""Rows out of files, folders, datasets and Python itself, from any place on; streams of them."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.mix import documents_for_tokenizer
from isles.data.sources import read
from isles.data.sources.find import HuggingFaceStream, open_huggingface, open_source
from isles.data.sources.parse import TextParser, make_parser
from isles.data.sources.read import file_chunks
from isles.data.sources.rows import PLAIN, Chunk, Row
from isles.data.stream import segments as stream_segments
from isles.data.stream.segments import HoldOut, SegmentRecord, Stream, make_segment, segment_table
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from tests.data import write_parquet, write_rows
from tests.disks import closed
from tests.each import each

TEXTS = [f"document {i} " + "word " * (i * 7919 % 60) for i in range(700)]
ROWS = [{"text": text} for text in TEXTS]
COLUMNS = TextParser("text")
LINES = b'{"text": "a\\u00e9\\ud83d\\ude00", "n": 1}\n\n{"text": ""}\n{"text": "b\\nc"}'


def documents(path: Path | str, **keys: Any) -> list[str]:
    source = SourceConfig(path=str(path), **keys)
    return list(documents_for_tokenizer(DataConfig(sources=(source,))))


def error_of(path: Path | str, **keys: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        documents(path, **keys)
    return caught.value


@each(
    ("a.txt", "\ufeffzwölf\r\n\nBoxkämpfer".encode(), ["zwölf\r\n\nBoxkämpfer"]),
    ("a.jsonl", LINES, ["aé😀", "b\nc"]),
    ("a.json", b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
    ("b.json", b'\xef\xbb\xbf \n[\n{"text": "a"},\n  {"text": "b"}\n]\n', ["a", "b"]),
    ("a.csv", b'n,text\n1,"a, ""b""\nc"\n\n2,d\n', ['a, "b"\nc', "d"]),
    ("long.csv", b"text\n" + b"x" * 200_000 + b"\n", ["x" * 200_000]),
    ("a.tsv", b"text\tn\nx y\t1\n", ["x y"]),
)
def test_a_file_is_read_by_its_ending_packed_or_not(name, content, texts, *, tmp_path):
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    assert documents(tmp_path / name) == documents(tmp_path / f"{name}.gz") == texts


@each("file", "folder")
def test_no_read_permission(which):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # not closed, as /tmp of tests is
        folder = Path(name) / "folder"
        folder.mkdir()
        file = folder / "a.txt"
        file.write_text("text")
        Path(name).chmod(0o755)
        folder.chmod(0o755)
        with closed(file if which == "file" else folder):
            error = error_of(file)
    assert "no read permission" in error.what and error.where == str(file)
    assert "chmod" in error.fix


def test_a_glob_goes_deep_and_a_path_that_names_nothing_says_what_is_near(tmp_path, monkeypatch):
    for name in ("b.txt", "x/c.txt", "a.txt", "x/y/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").write_text("")
    assert documents(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert documents(tmp_path / "**/*.txt") == ["a.txt", "b.txt", "x/c.txt", "x/y/d.txt"]
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/corpus").write_text("x")
    assert documents("data/corpus") == ["x"], "a path, and no id of the hub"
    assert "did you mean corpus?" in error_of("data/corpse").fix
    assert str(tmp_path) in error_of(tmp_path / "no" / "such" / "file.txt").fix
    assert f"{tmp_path}/data/**/*.jsonl" in error_of(tmp_path / "data").fix
    error = error_of("data/*.jsonl")
    assert "data/*.jsonl" in error.what and str(tmp_path) in error.where


def test_saved_datasets_are_read_also_from_any_row_on(tmp_path):
    import datasets

    train = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    train.save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict({"train": train, "test": train.select([1])})
    both.save_to_disk(tmp_path / "both")
    assert documents(tmp_path / "one") == ["a", "b"]
    assert documents(tmp_path / "both", split="test") == ["b"]
    error = error_of(tmp_path / "both", split="tset")
    assert "the dataset has train, test" in error.what and "to test" in error.fix
    (tmp_path / "plain" / "v1.2").mkdir(parents=True)
    for name in ("v1.2/a.1.md", "v1.2/b.md", "LICENSE"):
        (tmp_path / "plain" / name).write_text("a")
    error = error_of(tmp_path / "plain")
    assert "plain is a folder" in error.what and error.fix.endswith("plain/**/*.md")
    assert "the columns are text, n" in error_of(tmp_path / "one", text_column="body").what
    assert "2 of 2 rows" in error_of(tmp_path / "one", text_column="n").what
    one = SourceConfig(path=str(tmp_path / "one"))
    assert open_source(one).identity() == open_source(one).identity()
    for arrow in (tmp_path / "one").glob("*.arrow"):
        arrow.write_bytes(b"junk")
    assert "cannot be used" in error_of(tmp_path / "one").what
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "long")
    source = open_source(SourceConfig(path=str(tmp_path / "long")), streams=True)
    assert_read_on(partial(source.chunks, COLUMNS), TEXTS)


def test_hub_datasets_and_an_id_that_cannot_be_reached(tmp_path, monkeypatch):
    import datasets

    # A folder laid out like a repository of the hub takes the same way through load_dataset.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_parquet(tmp_path / "repo/data/train-0.parquet", {"text": ["a", "b"]})
    write_parquet(tmp_path / "repo/data/test-0.parquet", {"text": ["c"]})
    repo = str(tmp_path / "repo")
    train, test = open_huggingface(repo, None, "train"), open_huggingface(repo, None, "test")
    for source, texts in ((train, ["a", "b"]), (test, ["c"])):
        assert texts_of(source.chunks(COLUMNS)) == texts
    assert test.identity() == open_huggingface(repo, None, "test").identity() != train.identity()
    with pytest.raises(DataError, match=r"\['test', 'train'\]|\['train', 'test'\]"):
        open_huggingface(repo, None, "validation")
    with pytest.raises(DataError, match="no-such-subset"):
        open_huggingface(repo, "no-such-subset", "train")
    monkeypatch.chdir(tmp_path)
    error = error_of("no-such-owner/no-such-data")
    assert error.what.startswith("cannot be loaded") and error.where == "no-such-owner/no-such-data"
    assert "does not exist in" in error.fix


def test_what_every_python_carries():
    docs = documents("python-docs")
    assert len(docs) > 60 and sum(map(len, docs)) > 300_000
    assert any('"assert" statement' in text for text in docs)
    assert docs == documents("python-docs")
    library = open_source(SourceConfig(path="python-stdlib"))
    rows = library.rows(make_parser(SourceConfig()))
    texts = [row.columns[PLAIN] for row, _ in zip(rows, range(50), strict=False)]
    assert len(texts) == 50 and sum(map(len, texts)) > 100_000
    assert "python" in library.identity()


def texts_of(chunks: Any) -> list[str]:
    rows = [row for chunk in chunks for row in chunk.rows]
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.columns.get("text", row.columns.get(PLAIN)) for row in rows]


def assert_read_on(chunks: Callable[[Any], Any], texts: list[str]) -> None:
    """What is read from each chunk on, by where it begins, is what follows in the whole."""
    whole: list[Chunk] = list(chunks({}))
    assert len(whole) >= 3 and texts_of(whole) == texts
    for number, chunk in enumerate(whole):
        begin = json.loads(json.dumps(chunk.begin))
        following = list(chunks(begin))
        assert [c.rows for c in following] == [c.rows for c in whole[number:]]
        assert following[0].begin == chunk.begin
    assert list(chunks(whole[-1].end)) == []
    assert [chunk.end for chunk in whole[:-1]] == [chunk.begin for chunk in whole[1:]]


def test_a_file_is_read_on_from_any_place(tmp_path):
    lines = write_rows(tmp_path / "a.jsonl", ROWS).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS))
    columns = {"n": range(len(TEXTS)), "text": TEXTS}
    write_parquet(tmp_path / "a.parquet", columns, row_group_size=300)
    for path in tmp_path.glob("a.*"):
        assert_read_on(partial(file_chunks, path, COLUMNS), TEXTS)


@each("a.txt", "a.txt.gz")
def test_a_long_text_is_cut_at_lines_and_read_on_from_any_piece(name, *, tmp_path, monkeypatch):
    """And where it has no lines, between characters."""
    monkeypatch.setattr(read, "WHOLE_BYTES", 2000)
    monkeypatch.setattr(read, "PIECE_BYTES", 703)  # three bytes behind the start of a character
    path, text = tmp_path / name, "\n".join(TEXTS[:100]) + "x" + "😀" * 1500
    pack = gzip.compress if name.endswith("gz") else bytes
    path.write_bytes(pack(text.encode()))
    pieces = texts_of(file_chunks(path, COLUMNS, {}))
    assert len(pieces) > 10 and "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= 703
    assert all(piece.endswith("\n") for piece in pieces if "😀" not in piece)
    assert_read_on(partial(file_chunks, path, COLUMNS), pieces)
    path.write_bytes(pack(text.encode() + b"\n\xff\n"))
    error = error_of(path)
    assert f"offset {len(text.encode()) + 1}" in error.what and error.where == f"{path}:101"


def test_hub_datasets_are_read_on_from_the_librarys_state(tmp_path):
    import datasets

    parts = [ROWS[start : start + 240] for start in (0, 240, 480)]
    names = [str(write_rows(tmp_path / f"{n}.jsonl", part)) for n, part in enumerate(parts)]
    cache = str(tmp_path / "cache")
    builder = datasets.load_dataset_builder("json", data_files=names, cache_dir=cache)
    source = HuggingFaceStream("three files", builder, "train")
    assert_read_on(partial(source.chunks, COLUMNS), TEXTS)


@pytest.fixture
def tokenizer(monkeypatch):
    """Of its tokens a segment of a stream has a few thousand."""
    monkeypatch.setattr(stream_segments, "SEGMENT_TOKENS", 6000)
    return train_tokenizer(TEXTS, 300)


def stream_of(path: Path, tokenizer: Any, **keys: Any) -> Stream:
    data = {"sources": [{"path": str(path)}], "seq_length": 32, "streaming": True, **keys}
    return Stream(DataConfig.model_validate(data), 0, tokenizer, 5)


def segments(stream: Stream, folder: Path, count: int, before: SegmentRecord | None = None) -> Any:
    """The next segments of a stream, and their tokens."""
    made = []
    folder.mkdir(exist_ok=True)
    for _ in range(count):
        number = before.number + 1 if before else 0
        before = make_segment(stream, before, folder / str(number))
        made.append((before, TokenStore.open(folder / str(number))))
    return made


def tokens_read(stream: Stream, made: Any) -> list[int]:
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


@each(("a.jsonl", True), ("a.parquet", True), ("a.jsonl", False))
def test_segments_follow_on_without_losing_a_token(name, packing, *, tmp_path, tokenizer):
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


def test_a_stream_reads_nothing_of_what_came_before(tmp_path, tokenizer):
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


@each("", '{"text": " "}\n' * 10)
def test_nothing_to_train_on_is_an_error(content, *, tmp_path, tokenizer):
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

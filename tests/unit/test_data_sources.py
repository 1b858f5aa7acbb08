"""Documents out of files, folders, datasets and Python itself."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.mix import documents_for_tokenizer
from isles.data.sources.find import open_hub, open_source
from isles.data.sources.parse import make_parser
from isles.data.sources.read import PIECE_BYTES, WHOLE_BYTES
from isles.data.sources.rows import PLAIN
from isles.errors import DataError
from tests.deadline import DEADLINE_S
from tests.each import each


def documents(path: Path | str, **keys: Any) -> list[str]:
    source = SourceConfig(path=str(path), **keys)
    return list(documents_for_tokenizer(DataConfig(sources=(source,))))


def rows_of(source: Any, name: str = "text") -> list[Any]:
    """The values of one column of an opened source."""
    return [row.columns[name] for row in source.rows(make_parser(SourceConfig(text_column=name)))]


def error_of(path: Path | str, **keys: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        documents(path, **keys)
    return caught.value


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


# Text


def test_a_text_file_is_one_document(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffzwölf\r\n\nBoxkämpfer".encode())
    assert documents(file) == ["zwölf\r\n\nBoxkämpfer"]


def test_a_large_text_file_is_cut_at_lines(tmp_path: Path):
    file = tmp_path / "large.txt"
    line = "ä" * 1000 + "\n"
    file.write_text(line * (WHOLE_BYTES // 2001 + 1), encoding="utf-8")
    pieces = documents(file)
    assert len(pieces) > 3
    assert all(piece.endswith("\n") and len(piece.encode()) <= PIECE_BYTES for piece in pieces)
    assert "".join(pieces) == file.read_text(encoding="utf-8")
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"\xff\n")
    error = error_of(file)
    assert f"offset {size}" in error.what and error.where == f"{file}:{size // 2001 + 1}"


def test_a_large_text_file_without_lines_is_cut_between_characters(tmp_path: Path):
    file = tmp_path / "large.txt.gz"
    text = "x" + "ä" * (WHOLE_BYTES // 2)
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(text.encode())
    assert "".join(documents(file)) == text


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("x")
    assert "did you mean corpus.txt?" in error_of(tmp_path / "corpsu.txt").fix
    assert str(tmp_path.absolute()) in error_of(tmp_path / "no" / "such" / "file.txt").fix


@each("closed", ["file", "folder"])
def test_no_read_permission(closed: str):
    script = (
        "import os, sys\n"
        "from tests.unit.test_data_sources import documents\n"
        "from isles.errors import DataError\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: documents(sys.argv[1])\n"
        "except DataError as error: sys.exit(str(error))\n"
    )
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = Path(name) / "folder"
        folder.mkdir()
        file = folder / "a.txt"
        file.write_text("text")
        Path(name).chmod(0o755)
        (file if closed == "file" else folder).chmod(0)
        ended = subprocess.run(
            [sys.executable, "-c", script, str(file)],
            capture_output=True,
            check=False,
            text=True,
            timeout=DEADLINE_S,
        )
        folder.chmod(0o700)
    assert ended.returncode == 1
    assert "no read permission" in ended.stderr and str(file) in ended.stderr, ended.stderr
    assert "chmod" in ended.stderr


# Globs and folders


def test_a_glob_is_sorted_and_goes_deep(tmp_path: Path):
    for name in ("b.txt", "x/c.txt", "a.txt", "x/y/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").write_text("")
    assert documents(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert documents(tmp_path / "**/*.txt") == ["a.txt", "b.txt", "x/c.txt", "x/y/d.txt"]


def test_a_glob_without_a_match_names_pattern_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    error = error_of("data/*.jsonl")
    assert "data/*.jsonl" in error.what and str(tmp_path) in error.where


def test_a_plain_folder_suggests_the_glob(tmp_path: Path):
    (tmp_path / "a.md").write_text("x")
    assert f"{tmp_path}/**/*.jsonl" in error_of(tmp_path).fix


def test_a_relative_path_is_a_path_and_not_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/corpus").write_text("x")
    assert documents("data/corpus") == ["x"]
    assert "did you mean corpus?" in error_of("data/corpse").fix


# JSON lines


@each("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str):
    file = tmp_path / name
    content = b'{"text": "a\\u00e9\\ud83d\\ude00", "n": 1}\n\n{"text": ""}\n{"text": "b\\nc"}'
    file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert documents(file) == ["aé😀", "b\nc"]


@each("name", ["a.json", "a.json.gz"])
def test_a_json_array(tmp_path: Path, name: str):
    file = tmp_path / name
    content = b'\xef\xbb\xbf \n[\n{"text": "a"},\n  {"text": "b"}\n]\n'
    file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert documents(file) == ["a", "b"]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'[{"text": "a"}\n]')
    assert "NAME.json" in error_of(file).fix


def test_csv(tmp_path: Path):
    file = tmp_path / "a.csv"
    file.write_text('n,text\n1,"a, ""b""\nc"\n\n2,d\n')
    assert documents(file) == ['a, "b"\nc', "d"]
    (tmp_path / "a.tsv").write_text("text\tn\nx y\t1\n")
    assert documents(tmp_path / "a.tsv") == ["x y"]
    file.write_text("text\n" + "x" * 200_000 + "\n")
    assert documents(file) == ["x" * 200_000]


# Parquet


def test_parquet(tmp_path: Path):
    texts = [f"row {i}" for i in range(3000)]
    file = write_parquet(tmp_path / "a.parquet", {"id": list(range(3000)), "body": texts})
    assert documents(file, text_column="body") == texts
    error = error_of(file, text_column="bodi")
    assert "there are: id, body" in error.what and "to body" in error.fix
    error = error_of(file, text_column="id")
    assert f"{file} row 0: column 'id' holds int '0', not text" in error.what
    assert "3000 of 3000 rows" in error.what and "column of strings" in error.fix


# Datasets


def test_saved_datasets(tmp_path: Path):
    import datasets

    train = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    train.save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict({"train": train, "test": train.select([1])})
    both.save_to_disk(tmp_path / "both")
    assert documents(tmp_path / "one") == ["a", "b"]
    assert documents(tmp_path / "both", split="test") == ["b"]
    error = error_of(tmp_path / "both", split="tset")
    assert "there are: train, test" in error.what and "to test" in error.fix
    assert "there are: text, n" in error_of(tmp_path / "one", text_column="body").what
    assert "2 of 2 rows" in error_of(tmp_path / "one", text_column="n").what
    source = open_source(SourceConfig(path=str(tmp_path / "one")))
    assert source.identity() == open_source(SourceConfig(path=str(tmp_path / "one"))).identity()
    for arrow in (tmp_path / "one").glob("*.arrow"):
        arrow.write_bytes(b"junk")
    assert "cannot be loaded" in error_of(tmp_path / "one").what


def test_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    # A folder laid out like a repository of the hub takes the same way through load_dataset.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_parquet(tmp_path / "repo/data/train-0.parquet", {"text": ["a", "b"]})
    write_parquet(tmp_path / "repo/data/test-0.parquet", {"text": ["c"]})
    repo = str(tmp_path / "repo")
    assert rows_of(open_hub(repo, None, "train")) == ["a", "b"]
    source = open_hub(repo, None, "test")
    assert rows_of(source) == ["c"]
    assert source.identity() == open_hub(repo, None, "test").identity()
    assert source.identity() != open_hub(repo, None, "train").identity()
    with pytest.raises(DataError, match=r"\['test', 'train'\]|\['train', 'test'\]"):
        open_hub(repo, None, "validation")
    with pytest.raises(DataError, match="no-such-subset"):
        open_hub(repo, "no-such-subset", "train")


def test_a_hub_id_that_cannot_be_reached(tmp_path: Path):
    script = (
        "import sys\n"
        "from isles.config.sections.data import SourceConfig\n"
        "from isles.data.sources.find import open_source\n"
        "from isles.errors import DataError\n"
        "try: open_source(SourceConfig(path='no-such-owner/no-such-data'))\n"
        "except DataError as error: sys.exit(str(error))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 1
    assert "no-such-owner/no-such-data: cannot be loaded" in ended.stderr
    assert "does not exist in" in ended.stderr and "Traceback" not in ended.stderr


# Built in


def test_python_docs():
    texts = documents("python-docs")
    assert len(texts) > 60 and sum(map(len, texts)) > 300_000
    assert any('"assert" statement' in text for text in texts)
    assert texts == documents("python-docs")


def test_python_stdlib():
    source = open_source(SourceConfig(path="python-stdlib"))
    rows = source.rows(make_parser(SourceConfig()))
    texts = [row.columns[PLAIN] for row, _ in zip(rows, range(50), strict=False)]
    assert len(texts) == 50 and sum(map(len, texts)) > 100_000
    identity = source.identity()
    assert "python" in identity


def test_identity_follows_the_files(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    source = open_source(SourceConfig(path=str(file)))
    before = source.identity()
    assert before == source.identity() and json.loads(json.dumps(before)) == before
    os.utime(file, ns=(0, 0))
    assert source.identity() != before

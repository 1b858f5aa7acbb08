"""Texts in the manner of public datasets, and files that programs and people make by mistake."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.published import Given, array, check, lines, parquet, plain, raw, saved, table, text

ROW = {"text": "One.\n\nTwo."}
SAME = [text("One.\n\nTwo.")]
META = {"pile_set_name": "ArXiv"}
WEB = {"url": "https://a.example", "timestamp": "2019-04-25T12:57:54Z"}


def tar(path: Path, rows: list[Any]) -> None:
    """Texts in a tar archive, packed as OpenWebText packs its parts."""
    with tarfile.open(path, "w:xz") as archive:
        for number, row in enumerate(rows):
            data = row["text"].encode()
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def column(kind: str, values: list[Any]) -> Any:
    """A table with one column of a type of pyarrow."""
    import pyarrow as pa

    kinds = {
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
        "binary": pa.binary(),
        "date": pa.timestamp("us", "UTC"),
        "decimal": pa.decimal128(9, 2),
        "large": pa.large_string(),
        "view": pa.string_view(),
        "views": pa.list_view(pa.string()),
    }
    return pa.table({"text": pa.array(values, kinds[kind])})


PUBLISHED = (
    Given(  # C4
        "en/c4-train.00000-of-01024.json.gz",
        lines,
        [{**ROW, **WEB}],
        {},
        SAME,
        "timestamp 100 %, url 100 %",
        path="en/c4-train.*.json.gz",
        beside={"en/c4-validation.00000-of-00008.json.gz": gzip.compress(b"{}\n")},
    ),
    Given(  # mC4
        "multilingual/c4-de.tfrecord-00000-of-01024.json.gz",
        lines,
        [{**ROW, **WEB}],
        {},
        SAME,
        "timestamp 100 %, url 100 %",
    ),
    Given(  # FineWeb
        "data/CC-MAIN-2024-10/000_00000.parquet",
        parquet,
        [{**ROW, "id": "<urn:uuid:1>", "dump": "CC-MAIN-2024-10", "language_score": 0.97}] * 3,
        {},
        SAME * 3,
        "dump 100 %, id 100 %, language_score 100 %",
        path="data/*/*.parquet",
    ),
    Given("train/00.jsonl.zst", lines, [{**ROW, "meta": META}], {}, SAME, "meta 100 %"),  # The Pile
    Given(  # RedPajama 2
        "documents/2023-06/0000/en_head.json.gz",
        lines,
        [{"raw_content": "One.\n\nTwo.", "length": 10}],
        {"text_column": "raw_content"},
        SAME,
        "length 100 %",
    ),
    Given(  # the same without the name of its column
        "documents/en_head.json.gz",
        lines,
        [{"raw_content": "One.", "length": 10}],
        {},
        ("column 'text' not found; the columns are raw_content, length", "text_column to ITS_NAME"),
    ),
    Given(  # StarCoder
        "python/train-00000-of-00059.parquet",
        parquet,
        [{"max_stars_repo_path": "a.py", "max_stars_count": None, "content": "def f():\n\treturn"}],
        {"text_column": "content"},
        [text("def f():\n\treturn")],
        "max_stars_repo_path 100 %",
    ),
    Given(  # Wikipedia
        "20231101.en/train-00000-of-00041.parquet",
        parquet,
        [{"id": "12", "title": "Ä", **ROW}],
        {},
        SAME,
        "id 100 %, title 100 %",
    ),
    Given(  # OSCAR 23
        "en_meta/en_meta_part_1.jsonl.zst",
        lines,
        [{"content": "One.\n\nTwo.", "warc_headers": {"a": 1}, "metadata": {"tlsh": None}}],
        {"text_column": "content"},
        SAME,
        "metadata 100 %, warc_headers 100 %",
    ),
    Given("de_part_1.txt.gz", plain, "One.\n\nTwo.\n", {}, [text("One.\n\nTwo.\n")]),  # OSCAR 2019
    Given(  # OpenWebText: a packed archive whose name does not say so
        "urlsf_subset00-1_data.xz",
        tar,
        [ROW, ROW],
        {},
        ("this is a tar archive", "unpack"),
    ),
    Given("openwebtext.tar", raw, b"", {}, ("isles does not read .tar files", "unpack it")),
    Given(  # scientific papers
        "arxiv-dataset/train.txt",
        lines,
        [{"article_text": ["a b ."], "abstract_text": ["<S> c . </S>"]}] * 3,
        {},
        ("most lines are JSON objects", ".jsonl"),
    ),
    Given(
        "books_large_p1.txt", plain, "one .\ntwo .\n", {}, [text("one .\ntwo .\n")]
    ),  # BookCorpus
    Given(  # WikiText: headings, and a row for each line
        "wikitext-2-raw-v1/train-00000-of-00001.parquet",
        parquet,
        [{"text": line} for line in ("", " = Head = \n", "", " It is . \n", " ")],
        {},
        [text(" = Head = \n"), text(" It is . \n")],
    ),
    Given(
        "wiki.train.raw", plain, " \n = H = \n \n It is .", {}, [text(" \n = H = \n \n It is .")]
    ),
    Given(  # TinyStories: the end of text is written out
        "TinyStories-train.txt",
        plain,
        "One day.\n<|endoftext|>\nOnce.\n<|endoftext|>\n",
        {},
        ["[[One day.\n<|endoftext|>\nOnce.\n<|endoftext|>\n<|endoftext|>]]"],
    ),
    Given(  # CulturaX
        "de/de_part_00000.parquet",
        parquet,
        [{**ROW, "source": "mC4", "timestamp": None}],
        {},
        SAME,
        "source 100 %",
    ),
    Given(  # Dolma
        "v1_6/books-0000.json.gz",
        lines,
        [{"id": "1", **ROW, "added": "2023", "metadata": {"a": [1, None]}}, {"id": "2", **ROW}],
        {},
        SAME * 2,
        "id 100 %, added 50 %, metadata 50 %",
    ),
    Given(  # Cosmopedia
        "data/stories/train-00000-of-00043.parquet",
        parquet,
        [{"prompt": "Write.", "text_token_length": 9, **ROW, "seed_data": "web"}],
        {},
        SAME,
        "prompt 100 %, seed_data 100 %, text_token_length 100 %",
    ),
    Given("hf", saved, [{**ROW, "label": 1}], {}, SAME, "label 100 %"),
    Given(
        "hf",
        saved,
        [ROW],
        {"split": "dev"},
        ("split 'dev' not found; the dataset has train, test", ""),
    ),
    Given(  # the folder of a clone of a dataset
        "clone/data/train-00000-of-00001.parquet",
        parquet,
        [ROW],
        {},
        ("", "**"),
        path="clone",
        beside={"clone/README.md": b"---\n", "clone/dataset_info.json": b"{}"},
    ),
)

MISTAKES = (
    Given("a.jsonl", lambda path, rows: lines(path, rows, "\r\n"), [ROW] * 2, {}, SAME * 2),
    Given("a.jsonl", lambda path, rows: lines(path, rows, "\n\n \n"), [ROW] * 2, {}, SAME * 2),
    Given(
        "a.jsonl",
        lambda path, rows: lines(path, rows, ",\n"),
        [ROW] * 2,
        {},
        ("Extra data", "sed 's/,[[:space:]]*$//' FILE"),
    ),
    Given(
        "a.jsonl",
        lambda path, rows: lines(path, rows, ""),
        [ROW] * 2,
        {},
        ("Extra data", "jq -c . FILE > NEW.jsonl"),
    ),
    Given(  # printed over several lines, one behind another
        "a.jsonl",
        raw,
        json.dumps(ROW, indent=2).encode() * 2,
        {},
        ("not JSON", "jq -c . FILE > NEW.jsonl"),
    ),
    Given(
        "a.json",
        raw,
        json.dumps(ROW, indent=2).encode(),
        {},
        ("not JSON", "jq -c . FILE > NEW.jsonl"),
    ),
    Given("a.jsonl", array, [ROW, ROW], {}, ("not JSON", "one JSON array NAME.json")),
    Given("a.json", array, [ROW, ROW], {}, SAME * 2),
    Given("a.json", array, {"version": 1, "data": [ROW]}, {}, ("", "jq -c '.KEY[]'")),
    Given("a.json", array, [], {}, ("the source is empty", "")),
    Given("a.json", array, ["One."], {}, ("not a JSON object but str", "an array of JSON objects")),
    Given(  # separators of lines in Unicode do not end a line
        "a.jsonl",
        lines,
        [{"text": "a\u2028b\u2029c\x85d\x0b\x0ce"}],
        {},
        [text("a\u2028b\u2029c\x85d\x0b\x0ce")],
    ),
    Given("a.csv", table, [{"text": "a\u2028b\x85c"}], {}, [text("a\u2028b\x85c")]),
    Given("a.jsonl", lines, [{"text": "a\0b"}], {}, [text("a\0b")]),
    Given("a.jsonl", raw, b'{"text": "a\0b"}\n', {}, ("control character", "")),
    Given("a.csv", raw, b'text\n"a\0b"\n', {}, [text("a\0b")]),
    Given("a.txt", plain, "One \0 two, three, four.", {}, [text("One \0 two, three, four.")]),
    Given("a.jsonl", raw, b'{"text": "a\\ud800"}\n', {}, ("half of a surrogate pair", "")),
    Given("a.jsonl", raw, '{"text": "ä"}\n'.encode("latin-1"), {}, ("not UTF-8", "iconv")),
    Given("a.csv", raw, "text\nä\n".encode("utf-16"), {}, ("UTF-16", "iconv -f UTF-16")),
    Given("a.jsonl", lines, [{"text": 3}], {}, ("column 'text' holds int '3'", "text_column")),
    Given("a.jsonl", raw, b'{"text": "a", "n": NaN}\n', {}, [text("a")], "n 100 %"),
    Given(  # saved by a table program with the settings of many countries
        "a.csv",
        lambda path, rows: table(path, rows, delimiter=";"),
        [{"id": 1, **ROW}],
        {},
        ("separated by semicolons", "commas"),
    ),
    Given(  # MS MARCO: no line with names
        "collection.tsv",
        raw,
        b"0\tOne passage.\n1\tAnother.\n",
        {},
        ("the columns are 0, One passage.", "add a line with the column names above it"),
    ),
    Given("a.parquet", parquet, column("large", ["a", None]), {}, ("holds null", "text_column")),
    Given("a.parquet", parquet, column("large", ["a", ""]), {}, [text("a")]),
    Given("a.parquet", parquet, column("view", ["a"]), {}, [text("a")]),
    Given("a.parquet", parquet, column("dictionary", ["a", "b"]), {}, [text("a"), text("b")]),
    Given("a.parquet", parquet, column("binary", [b"a"]), {}, ("holds bytes", "text_column")),
    Given("a.parquet", parquet, column("decimal", [Decimal(1)]), {}, ("holds float", "")),
    Given("a.parquet", parquet, column("views", [["a"]]), {}, ("holds list", "text_column")),
)


@pytest.mark.parametrize("files", [PUBLISHED, MISTAKES], ids=["published", "mistakes"])
def test_texts(files, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    check(files, tmp_path)

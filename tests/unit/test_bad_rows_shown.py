"""Reports of bad rows and files, in the words of the user's data."""

from __future__ import annotations

import gzip
import io
import logging
import subprocess

import pytest
from rich.console import Console

from isles.config.load import load_run_file
from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.mix import documents_for_tokenizer
from isles.errors import DataError
from isles.run.paths import RunDir
from isles.train.data_show import show_data
from tests.each import each


def test_bad_rows_are_reported_once_if_the_tokenizer_is_trained(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    rows = [f'{{"text": "hello {number}"}}' for number in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, '{"text": 5}']))
    (tmp_path / "run.yaml").write_text(
        "model: {name_or_path: llama-2m, init: scratch}\n"
        "tokenizer: {train_vocab_size: 270}\n"
        "data: {sources: [{path: a.jsonl, type: text}], seq_length: 16, max_bad_fraction: 0.5,\n"
        "  cache_dir: cache}\n"
        "training: {max_steps: 1}\n"
    )
    config = load_run_file(tmp_path / "run.yaml").config
    for time in range(2):
        run_dir = RunDir(tmp_path / f"run{time}")
        run_dir.path.mkdir()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            show_data(config, run_dir, 1, Console(file=io.StringIO()))
        assert caplog.text.count("bad_rows=1") == 1
        assert caplog.text.count("bad row ") == 1


@each(
    ("a.jsonl", b'{"text": "a"}\r{"text": "b"}\r'),
    ("a b.json", b'{"text": "a"}\r{"text": "b"}'),
    ("rows", b'{"text": "a"}\r{"text": "b"}\r'),
    ("a.csv", b"n,text\r1,a\r2,b\r"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\r{"text": "b"}\r')),
    ("a.csv", b'n,text\r1,"a"\r2,"b"\r'),
    ("a.tsv", b"n\ttext\r1\ta\r2\tb\r"),
)
def test_line_ends_of_cr_alone_are_named(name, content, *, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / name
    file.write_bytes(content)
    source = SourceConfig(path=str(file), type="text")
    with pytest.raises(DataError) as caught:
        list(documents_for_tokenizer(DataConfig(sources=(source,), max_bad_fraction=0.5)))
    assert caught.value.what == "its lines end with CR alone, not with LF or CR LF"
    assert caught.value.where == f"{file}:1"
    # The printed fix works.
    command = caught.value.fix.partition(" writes")[0]
    if name.endswith(".gz"):
        assert command.startswith("unpack it, then ")
        file = file.with_suffix("")
        file.write_bytes(gzip.decompress(content))
    subprocess.run(command.removeprefix("unpack it, then "), shell=True, check=True)
    source = SourceConfig(path=f"NEW{file.suffix}", type="text")
    assert list(documents_for_tokenizer(DataConfig(sources=(source,)))) == ["a", "b"]


@each(
    ("a.jsonl", b'{"text": "a"}\r\n{"text": "b"\r\n', "not JSON"),
    ("a.jsonl", b'{"text": "a"}\r{"text": "b"}\n', "not JSON"),
    ("a.csv", b"n,text\n1,a\rb\n", "not CSV"),
)
def test_other_line_ends_are_not_called_cr(name, content, what, *, tmp_path):
    (tmp_path / name).write_bytes(content)
    source = SourceConfig(path=str(tmp_path / name), type="text")
    with pytest.raises(DataError) as caught:
        list(documents_for_tokenizer(DataConfig(sources=(source,))))
    assert caught.value.what.startswith(what)

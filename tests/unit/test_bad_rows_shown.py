"""Reports of bad rows and files, in the words of the user's data."""

from __future__ import annotations

import io
import logging

from rich.console import Console

from isles.config.load import load_run_file
from isles.run.paths import RunDir
from isles.train.data_show import show_data


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

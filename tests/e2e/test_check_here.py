"""`isles check` of this machine alone, with a source that is not there."""

from __future__ import annotations

import json

from isles.errors import ExitCode
from tests.e2e.typed import isles


def test_a_source_that_is_not_there_is_one_finding(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "y.jsonl").symlink_to("/nowhere/y.jsonl")
    (tmp_path / "run.yaml").write_text(
        "model: {name_or_path: llama-2m, init: scratch}\n"
        "tokenizer: {train_vocab_size: 300}\n"
        "data: {sources: [{path: '*.jsonl', type: text}], seq_length: 16}\n"
        "training: {max_steps: 1, warmup_steps: 0}\n"
    )
    asked = ("check", "run.yaml", "--no-net", "--json")
    command = isles(*asked, cwd=tmp_path, expected=ExitCode.PREFLIGHT)
    found = [f for f in json.loads(command.out)["findings"] if f["level"] == "error"]
    assert [finding["id"] for finding in found] == ["files.data"]
    assert "rm y.jsonl" in found[0]["fix"]

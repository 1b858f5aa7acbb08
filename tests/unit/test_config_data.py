"""Rules about sources, their columns, and the tokenizer and template that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.files import data_issues
from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigErrors
from tests.each import each

RUN = """\
model: {name_or_path: gpt2}
data:
  sources:
    - path: a.jsonl
      type: chat
      SOURCE
training: {max_steps: 100}
"""


def load(tmp_path: Path, source: str, *overrides: str) -> Loaded:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("SOURCE", source), encoding="utf-8")
    return load_run_file(file, overrides)


@each(
    ("source", "overrides", "what", "fix"),
    [
        ("columns: {xyz: a}", [], "no xyz", "use one of: messages, role"),
        (
            "columns: {text: a}",
            ["data.sources.0.type=text"],
            "type text has no text",
            "text_column",
        ),
        (
            "columns: {input: a, prompt: b}",
            ["data.sources.0.type=instruct"],
            "input and prompt, which belong to two forms",
            "or prompt and completion",
        ),
        ("text_column: body", [], "text_column means nothing to a source of type chat", "columns"),
        (
            "train_on: last",
            ["data.sources.0.type=preference"],
            "train_on last means nothing to a source of type preference",
            "delete it",
        ),
        ("trian_on: last", [], "trian_on", "did you mean train_on?"),
        ("train_on: user", [], "user", "assistant, last, all"),
        ("columns: [a]", [], "columns", "names with text"),
        ("columns: {messages: 3}", [], "messages is 3", 'messages: "3"'),
    ],
)
def test_a_faulty_source_is_reported_at_its_line(
    tmp_path: Path, source: str, overrides: list[str], what: str, fix: str
):
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, source, *overrides)
    found = [issue for issue in caught.value.issues if what in issue.what]
    assert len(found) == 1, str(caught.value)
    assert fix in found[0].fix, str(found[0])
    assert found[0].where.startswith(f"{tmp_path}/run.yaml:6")


@each(
    ("overrides", "what", "fix"),
    [
        (["data.sources=[{type: sharegpt, path: a}]"], "sharegpt", "chat"),
        (["data.sources=[{type: alpaca, path: a}]"], "alpaca", "instruct"),
        (["data.sources=[{type: chat}]"], "has no path", "add path"),
        (["train_on_inputs=true"], "train_on_inputs", "data.sources.0.train_on"),
        (["chat_template=chatml"], "chat_template", "tokenizer.chat_template"),
        (["data.max_bad_fraction=1.0"], "max_bad_fraction", "less than 1"),
        (["data.max_bad_fraction=2%"], "max_bad_fraction", "a number"),
        (
            [
                "data.sources=[{type: tokens, path: a}]",
                "tokenizer.train_vocab_size=300",
                "model.init=scratch",
            ],
            "belong to another tokenizer than one that is trained here",
            "tokenizer.name_or_path",
        ),
        (
            ["data.sources=[{type: fake}]", "tokenizer.chat_template=chatml"],
            "no messages for a chat template",
            "delete chat_template",
        ),
    ],
)
def test_a_faulty_value_is_reported(tmp_path: Path, overrides: list[str], what: str, fix: str):
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, "train_on: assistant", *overrides)
    found = [issue for issue in caught.value.issues if what in issue.what]
    assert len(found) == 1 and fix in found[0].fix, str(caught.value)


def test_missing_files_are_reported_before_the_start(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    source = f"columns: {{}}\n      split: train\n    - {{type: tokens, path: {tmp_path}/b.jsonl}}"
    overrides = [f"data.sources.0.path={tmp_path}/a.jsonl", "tokenizer.chat_template=chatlm"]
    issues = data_issues(load(tmp_path, source, *overrides))
    assert issues[0].what.startswith("there is no such file")
    assert "did you mean a.jsonl?" in issues[0].fix and issues[0].where.split(":")[1][0] == "8"
    assert "there is no chat template" in issues[1].what and "use chatml" in issues[1].fix
    assert data_issues(load(tmp_path, "", f"data.sources.0.path={tmp_path}/a.jsonl")) == []


def test_a_missing_model_is_reported_before_the_start(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "base").mkdir()
    data = f"data.sources.0.path={tmp_path}/a.jsonl"
    for key in ("model", "tokenizer"):
        name = f"{key}.name_or_path"
        (issue,) = data_issues(load(tmp_path, "", data, f"{name}={tmp_path}/bse"))
        assert name in issue.where and "there is no such folder" in issue.what
        assert issue.fix == "did you mean base?"
        for there in (str(tmp_path / "base"), "me/model", "gpt2"):
            assert data_issues(load(tmp_path, "", data, f"{name}={there}")) == []

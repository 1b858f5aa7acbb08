"""What a run file says about files of this machine is looked at before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isles.config.files import data_issues, shape_issues
from isles.config.load import load_run_file
from isles.errors import ConfigErrors
from isles.launch.base import resolve_here
from isles.run.env import hub_cache
from tests.each import each
from tests.run_files import load
from tests.unit.test_config_strategy import GOOD, LLAMA

SHORT = json.dumps({**LLAMA, "max_position_embeddings": 8})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file, a folder and a model in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    for name in ("folder", "base"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "config.json").write_text(SHORT)
    return tmp_path


@each(
    ("key", "value", "what", "fix"),
    [
        ("data.sources.0.path", "note.txt", "there is no such file", "did you mean notes.txt?"),
        ("data.sources.0.path", "folder/x", "there is no such file", "see ls"),
        ("data.sources.0.path", "/nowhere/x", "there is no such file", "the path ends at /"),
        ("data.sources.0.path", "*.jsonl", "matches no file", "try it with ls"),
        ("model.name_or_path", "./bse", "there is no such folder", "did you mean base?"),
        ("tokenizer.name_or_path", "./bse", "there is no such folder", "did you mean base?"),
        ("tokenizer.chat_template", "chatlm", "there is no chat template", "use chatml"),
    ],
)
def test_what_is_not_there_is_named(
    here: Path, key: str, value: str, *, what: str, fix: str
) -> None:
    chat = "data.sources.0.type=chat"
    (issue,) = data_issues(load(here, GOOD, chat, f"{key}='{value}'"))
    assert what in issue.what
    assert fix in issue.fix
    assert issue.where == f"command line {key}"


def test_what_is_there_or_may_be_on_the_hub_is_no_fault(here: Path) -> None:
    paths = ("notes.txt", "folder", "*.txt", "python-docs", "me/data", "wikitext")
    sources = ", ".join(f"{{path: '{path}'}}" for path in paths)
    for model in (f"{here}/base", "me/model", "gpt2"):
        found = load(here, GOOD, f"data.sources=[{sources}]", f"model.name_or_path={model}")
        assert data_issues(found) == []


def test_the_shape_is_found_wherever_it_lies(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = here / "hub" / "models--me--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(SHORT)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    monkeypatch.setenv("HF_HOME", str(here))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name in (here / "base", here / "base" / "config.json", "me/mine"):
        loaded = load(here, GOOD, f"model.name_or_path={name}", "tokenizer.name_or_path=x")
        (issue,) = shape_issues(loaded, hub_cache())
        assert "longer than the model's max_position_embeddings, 8" in issue.what
        assert issue.where == "command line model.name_or_path"
    # What is not here, or cannot be read, the ranks look for again.
    (here / "base" / "config.json").write_text("[")
    for name in ("me/other", "nothing", str(here), f"{here}/base"):
        assert shape_issues(load(here, GOOD, f"model.name_or_path={name}"), hub_cache()) == []


def test_all_that_is_known_before_the_start_is_told_at_once(here: Path) -> None:
    (here / "run.yaml").write_text(
        f"{GOOD.replace('gpt2', './base').replace('a/b', './nowhere.txt')}"
        "strategy: {kind: fsdp, tp_size: 3}\nclusters: [{gpus_per_node: 2}]\n"
    )
    with pytest.raises(ConfigErrors) as raised:
        resolve_here(load_run_file(here / "run.yaml"), lambda _: None, needs_data=True)
    words = ("max_position", "tp_size 3 does not divide", "no such file", "a multiple of 3 ranks")
    for word, issue in zip(words, raised.value.issues, strict=True):
        assert word in issue.what
        assert issue.where.startswith(f"{here / 'run.yaml'}:")

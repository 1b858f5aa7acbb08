"""`isles data show`: what is trained is what is shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.chat.template import use_template
from isles.data.show import SHOWN_TOKENS, figures_of, shown_documents
from isles.data.sources.find import open_source
from isles.data.tokens.encode import Encoder
from isles.data.tokens.prepare import prepare
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import train_tokenizer
from isles.facts.units import printable
from tests.deadline import DEADLINE_S


def talk(asked: str, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def show(run_file: Path, *arguments: str, colour: bool = False) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100", **({"FORCE_COLOR": "1"} if colour else {})}
    env.pop("NO_COLOR", None)
    return subprocess.run(
        [sys.executable, "-m", "isles", "data", "show", str(run_file), *arguments],
        cwd=run_file.parent,
        env=env,
        capture_output=True,
        check=False,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture
def chats(tmp_path: Path, run_file: Path) -> Path:
    """A run file that reads conversations and instructions."""
    rows: list[Any] = [{"messages": talk(f"Number {n}?", "It is " + "so " * n)} for n in range(30)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "chat.jsonl").write_text(text)
    instructions = [{"instruction": "Say it", "output": f"[red]{n}[/red]"} for n in range(7)]
    (tmp_path / "alpaca.json").write_text(json.dumps(instructions, indent=1))
    content = yaml.safe_load(run_file.read_text())
    content["data"]["sources"] = [
        {"path": "chat.jsonl", "type": "chat"},
        {"path": "alpaca.json", "type": "instruct", "train_on": "all"},
    ]
    content["data"]["cache_dir"] = str(tmp_path / "prepared")
    run_file.write_text(yaml.safe_dump(content))
    return run_file


def test_samples_and_counts_are_printed(chats: Path, tmp_path: Path):
    shown = show(chats, "--samples", "2", "data.seq_length=24")
    assert shown.returncode == 0, shown.stderr
    out = shown.stdout
    assert "1. chat.jsonl: type chat · template chatml · train_on assistant\n" in out
    assert "Number 0?<|im_end|>\n<|im_start|>assistant\n⟦It is <|im_end|>⟧\n" in out
    assert out.count("── chat ") == 2 and "chat 30 of 30" in out
    assert "longer than seq_length 24" in out
    assert "type instruct · template chatml · train_on all · every token is trained" in out
    assert "[red]6[/red]<|im_end|>" in out
    table = {line[:26].strip(): line[26:].split() for line in out.splitlines()}
    assert table["rows"] == table["documents"] == ["30", "7"]
    assert table["truncated"][0] == table["longer than seq_length"][0] != "0"
    assert table["trained tokens"][-1] == "(100.0%)"
    # A training that follows finds it ready: the second time nothing is prepared.
    before = sorted(path.name for path in (tmp_path / "prepared").glob("tokens-*"))
    again = show(chats, "--samples=1", colour=True)
    assert again.stderr.count("(prepared before)") == len(before) == 2
    assert sorted(path.name for path in (tmp_path / "prepared").glob("tokens-*")) == before
    assert "\x1b[1;32mIt is <|im_end|>" in again.stdout and "⟦" not in again.stdout
    assert not list(tmp_path.glob("runs*"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["user assistant hello zwölf 😀 yes no"] * 9, 300, is_chat=True)
    use_template(made, "chatml")
    return made


def store_of(tokenizer: Any, folder: Path, rows: list[Any], **source: Any) -> TokenStore:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = SourceConfig(path=str(folder / "a.jsonl"), **source)
    opened, encoder = open_source(made), Encoder(made, tokenizer)
    return TokenStore.open(prepare(opened, encoder, folder / "c", progress=lambda _: None))


def test_a_document_is_shown_whole_and_marked_exactly(tokenizer: Any, tmp_path: Path):
    rows = [{"messages": [*talk("hello 😀", " zwölf"), *talk("x", "y" * 2000)]}]
    store = store_of(tokenizer, tmp_path, rows, type="chat")
    (shown,) = shown_documents(store, tokenizer.decode, 100, 5)
    texts = [stretch.text for stretch in shown.stretches if stretch.is_trained]
    assert texts[0] == " zwölf<|im_end|>" and set(texts[1]) == {"y"}
    assert shown.num_hidden == len(store.tokens) - SHOWN_TOKENS > 0
    whole = tokenizer.decode(store.tokens[:SHOWN_TOKENS].tolist())
    assert "".join(stretch.text for stretch in shown.stretches) == whole
    assert printable("a\x1b[31m\r\x00\tb\nä") == "a\\x1b[31m\\r\\x00\tb\nä"


def test_pairs_are_shown_together(tokenizer: Any, tmp_path: Path):
    rows = [{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(9)]
    store = store_of(tokenizer, tmp_path, rows, type="preference")
    shown = list(shown_documents(store, tokenizer.decode, 100, 2))
    assert [one.title.split(":")[0] for one in shown] == [
        "preference 1 of 9, chosen",
        "preference 1 of 9, rejected",
        "preference 9 of 9, chosen",
        "preference 9 of 9, rejected",
    ]
    said = [one.stretches[1].text for one in shown]
    assert said == ["yes<|im_end|>", "no<|im_end|>"] * 2


def test_counts_of_what_is_cut_and_left_out(tokenizer: Any, tmp_path: Path):
    rows = [
        {"messages": talk("hello", "yes")},
        {"messages": talk("hello", "yes " * 40)},
        {"messages": talk("hello " * 40, "no")},
    ]
    store = store_of(tokenizer, tmp_path, rows, type="chat")
    data = DataConfig(sources=(SourceConfig(path="a", type="chat"),), seq_length=32)
    figures = figures_of(data, data.sources[0], store)
    assert (figures.rows, figures.documents, figures.over_length) == (3, 3, 2)
    assert (figures.counts.truncated, figures.counts.untrained) == (1, 1)
    assert figures.trained == int(store.trained.sum()) and figures.longest == max(
        store.document_ends[0], *(store.document_ends[1:] - store.document_ends[:-1])
    )

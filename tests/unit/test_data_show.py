"""`isles data show`: what is trained is what is shown."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.data.chat.template import use_template
from isles.data.show import SHOWN_TOKENS, shown_documents
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import train_tokenizer
from isles.facts.units import printable
from tests.data import prepare_file, write_rows
from tests.deadline import run_program


def talk(asked: str, said: str) -> dict[str, Any]:
    asks = {"role": "user", "content": asked}
    return {"messages": [asks, {"role": "assistant", "content": said}]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["user assistant hello zwölf 😀 yes no"] * 9, 300, is_chat=True)
    use_template(made, "chatml")
    return made


def store_of(tokenizer: Any, folder: Path, rows: list[Any], **source: Any) -> TokenStore:
    file = write_rows(folder / "a.jsonl", rows)
    return TokenStore.open(prepare_file(tokenizer, file, folder / "c", **source))


def test_samples_and_counts_are_printed(tmp_path: Path, run_file: Path):
    chats = [talk(f"Number {n}?", "It is " + "so " * n) for n in range(30)]
    write_rows(tmp_path / "chat.jsonl", chats)
    rows = [{"instruction": "Say it", "output": f"[red]{n}[/red]"} for n in range(7)]
    write_rows(tmp_path / "alpaca.jsonl", rows)
    content = yaml.safe_load(run_file.read_text())
    content["data"]["sources"] = [
        {"path": "chat.jsonl", "type": "chat"},
        {"path": "alpaca.jsonl", "type": "instruct", "train_on": "all"},
    ]
    content["data"]["cache_dir"] = str(tmp_path / "prepared")
    run_file.write_text(yaml.safe_dump(content))

    def show(*arguments: str, **environment: str) -> tuple[str, str]:
        names = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        command = [sys.executable, "-m", "isles", "data", "show", run_file, *arguments]
        ended = run_program(command, tmp_path, {**names, "COLUMNS": "100", **environment})
        assert ended.returncode == 0, ended.stderr
        return ended.stdout, ended.stderr

    out, _ = show("--samples", "2", "data.seq_length=24")
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
    out, said = show("--samples=1", FORCE_COLOR="1")
    assert said.count("(prepared before)") == len(before) == 2
    assert sorted(path.name for path in (tmp_path / "prepared").glob("tokens-*")) == before
    assert "\x1b[1;32mIt is <|im_end|>" in out and "⟦" not in out
    assert not list(tmp_path.glob("runs*"))


def test_a_document_is_shown_whole_and_marked_exactly(tokenizer: Any, tmp_path: Path):
    messages = talk("hello 😀", " zwölf")["messages"] + talk("x", "y" * 2000)["messages"]
    store = store_of(tokenizer, tmp_path, [{"messages": messages}], type="chat")
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
    titles = [one.title.split(":")[0].removeprefix("preference ") for one in shown]
    assert titles == [f"{n} of 9, {which}" for n in (1, 9) for which in ("chosen", "rejected")]
    said = [one.stretches[1].text for one in shown]
    assert said == ["yes<|im_end|>", "no<|im_end|>"] * 2

"""Broken data files and rows: each is named with its place and a fix, and leaves no cache."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from isles.config.sections.data import COLUMNS, SourceConfig
from isles.data.sources.find import open_source
from isles.data.sources.rows import Row, Tally
from isles.data.tokens.encode import Encoder, encode_each
from isles.data.tokens.prepare import prepare
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from tests import chat_templates as templates
from tests.each import each

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello"}
GOOD: dict[str, Any] = {
    "text": {"text": "good"},
    "chat": {"messages": [USER, SAID]},
    "instruct": {"instruction": "Say", "output": "yes"},
    "tokens": {"input_ids": [5, 6, 7]},
    "preference": {"prompt": "Say", "chosen": "yes", "rejected": "no"},
}


@dataclass(frozen=True)
class Broken:
    """A broken file, and what the error about it says.

    Args:
        kind: of the source.
        data: a row that follows a good one in JSON lines; or bytes; or a function that writes.
        what: parts of the message.
        fix: part of the fix.
        where: what follows the file's path in its place.
        name: of the file.
        keys: further keys of the source.
    """

    kind: str
    data: Any
    what: str
    fix: str
    where: str = ":2"
    name: str = "a.jsonl"
    keys: dict[str, Any] = field(default_factory=dict)


def messages(*found: Any) -> dict[str, Any]:
    return {"messages": list(found)}


def role(name: Any) -> dict[str, Any]:
    return messages({"role": name, "content": "Hi"}, SAID)


def content(value: Any) -> dict[str, Any]:
    return messages(USER, {"role": "assistant", "content": value})


def parquet(columns: dict[str, list[Any]]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), path)

    return write


def damaged(write: Callable[[Path], None], cut: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        write(path)
        os.truncate(path, path.stat().st_size - cut)

    return damage


def not_utf8(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    bad = pa.array([b"ok", b"\xff\xfe"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": bad}), path)


PREF = GOOD["preference"]
TOKENS = GOOD["tokens"]
BROKEN: dict[str, Broken] = {
    # Files
    "gzip-cut": Broken(
        "text", gzip.compress(os.urandom(999))[:-20], "damaged", "gzip -t", "", "a.txt.gz"
    ),
    "gzip-junk": Broken("chat", b"no gzip", "damaged", "fetch it again", "", "a.jsonl.gz"),
    "not-utf8-text": Broken("text", b"a\nb\xe9c", "not UTF-8: byte 0xe9", "iconv", ":2", "a.txt"),
    "not-utf8-line": Broken("chat", b'{}\n{"a": "\xff"}', "offset 10", "iconv"),
    "jsonl-cut": Broken("chat", b'{"messages": [{"role": "us', "not JSON", "cut off", ":1"),
    "jsonl-cut-in-a-character": Broken("text", b'{"text": "\xe2\x82', "0xe2", "cut off", ":1"),
    "jsonl-not-cut": Broken("chat", b'{"a": 1},', "not JSON: Extra data", "one JSON object", ":1"),
    "utf16": Broken("chat", "[{}]".encode("utf-16"), "not UTF-8", "UTF-16", ":1", "a.json"),
    "parquet-cut": Broken(
        "text",
        damaged(parquet({"text": ["abc"] * 99}), 40),
        "damaged",
        "fetch it again",
        "",
        "a.parquet",
    ),
    "parquet-not-utf8": Broken(
        "text", not_utf8, "codec can't decode", "fetch it again", "", "a.parquet"
    ),
    "parquet-column": Broken(
        "chat",
        parquet({"mesages": ["[]"], "id": [1]}),
        "no column 'messages'; there are: mesages, id",
        "columns: {messages: mesages}",
        "",
        "a.parquet",
    ),
    "parquet-named-column": Broken(
        "chat",
        parquet({"messages": ["[]"], "tool": ["[]"]}),
        "no column 'tols'",
        "{tools: tool}",
        "",
        "a.parquet",
        {"columns": {"tools": "tols"}},
    ),
    "csv-cells": Broken(
        "instruct", b"instruction,output\na,b\nc,d,e\n", "3 cells", "quotes", ":3", "a.csv"
    ),
    "csv-quotes": Broken(
        "instruct", b'instruction,output\na,"b"c\n', "not CSV", "quotes", ":2", "a.csv"
    ),
    "csv-column": Broken(
        "instruct", b"q,output\na,b\n", "no column 'instruction'", "columns", ":1", "a.csv"
    ),
    "array-cut": Broken(
        "instruct",
        b'[\n{"instruction": "a", "output": "b"},\n{"instr',
        "not JSON",
        "json.tool",
        ":3",
        "a.json",
    ),
    "array-more": Broken("text", b'[{"text": "a"}]\n]', "Extra data", "repair", ":2", "a.json"),
    "array-items": Broken(
        "text",
        b'[{"text": "a"},\n"b"]',
        "not a JSON object but str",
        "objects",
        " row 2",
        "a.json",
    ),
    "object-over-lines": Broken(
        "chat", b'{\n"messages": []\n}', "not JSON", "a line", "", "a.json"
    ),
    "text-as-chat": Broken(
        "chat", b"Hello", "plain text, without a column 'messages'", "type: text", "", "a.txt"
    ),
    "empty-text": Broken("text", b" \n", "is empty", "take it out", "", "a.txt"),
    "empty-rows": Broken("chat", b"\n\n", "is empty: no row", "take it out", ""),
    # Rows of any type
    "not-json": Broken("chat", b'{"messages": []\n', "not JSON", "a line", ":1"),
    "no-object": Broken("instruct", [1], "not a JSON object but list", "jq"),
    "surrogate": Broken("text", {"text": "a\ud800"}, "surrogate", "repair"),
    "surrogate-chat": Broken(
        "chat", content("a\udc00"), "messages[1].content holds half", "repair"
    ),
    "text-null": Broken("text", {"text": None}, "holds null, not text", "text_column"),
    "text-column": Broken("text", {"txt": "a"}, "no column 'text'", "text_column to txt"),
    # Chat
    "chat-column": Broken("chat", {"message": []}, "no column 'messages'", "{messages: message}"),
    "chat-null": Broken("chat", {"messages": None}, "holds null, not a list of messages", "remove"),
    "chat-empty": Broken("chat", {"messages": []}, "holds no message", "remove"),
    "chat-no-role": Broken(
        "chat", messages({"rol": "user", "content": "a"}), "messages[0] has no role", "{role: rol}"
    ),
    "chat-no-content": Broken(
        "chat", messages({"role": "user", "text": "a"}), "has no content; it has: role", "content"
    ),
    "chat-role": Broken("chat", role("asistant"), "'asistant', which is no role", "assistant"),
    "chat-content-null": Broken("chat", content(None), "messages[1].content holds null", "repair"),
    "chat-image": Broken("chat", content([{"type": "image"}]), "part of type 'image'", "repair"),
    "chat-no-answer": Broken(
        "chat", messages(USER), "no message of the assistant to train on (roles: user)", "remove"
    ),
    "chat-empty-answer": Broken("chat", content(" \n"), "the assistant says nothing", "remove"),
    "chat-turns": Broken(
        "chat", messages(USER, USER, SAID), "user and assistant must take turns", "another template"
    ),
    "chat-tools": Broken("chat", {**GOOD["chat"], "tools": "[1]"}, "not a list of tools", "repair"),
    "chat-tool-calls": Broken(
        "chat", messages(USER, {**SAID, "tool_calls": 3}), "tool_calls holds int '3'", "repair"
    ),
    "chat-system": Broken("chat", {**GOOD["chat"], "system": 1}, "'system' holds int", "repair"),
    # Instructions
    "instruct-column": Broken(
        "instruct", {"instruktion": "a", "output": "b"}, "no column 'instruction'", "instruktion"
    ),
    "instruct-output": Broken("instruct", {"instruction": "a"}, "no column 'output'", "columns"),
    "instruct-empty": Broken("instruct", {"instruction": "a", "output": " "}, "is empty", "remove"),
    "instruct-input": Broken(
        "instruct", {**GOOD["instruct"], "input": 5}, "column 'input' holds int '5'", "repair"
    ),
    "instruct-both": Broken(
        "instruct",
        {"instruction": "a", "output": "b", "prompt": "c", "completion": "d"},
        "both instruction and output, and prompt and completion",
        "columns: {prompt: prompt}",
    ),
    # Token ids
    "tokens-range": Broken(
        "tokens", {"input_ids": [5, 999]}, "999, and the tokenizer knows", "name"
    ),
    "tokens-huge": Broken("tokens", {"input_ids": [5, 2**70]}, "no token id", ""),
    "tokens-float": Broken("tokens", {"input_ids": [5.0, 6]}, "input_ids[0] holds float", "repair"),
    "tokens-empty": Broken("tokens", {"input_ids": []}, "is empty", "remove"),
    "tokens-one": Broken("tokens", {"input_ids": [5]}, "none is trained", "remove"),
    "tokens-labels": Broken(
        "tokens", {**TOKENS, "labels": [-100, 6]}, "labels has 2 numbers, and there are 3", "re"
    ),
    "tokens-shifted": Broken(
        "tokens",
        {**TOKENS, "labels": [6, 7, -100]},
        "labels[0] is 6, and input_ids[0] is 5",
        "shift",
    ),
    "tokens-mask": Broken(
        "tokens", {**TOKENS, "attention_mask": [1, 0, 1]}, "not a run of 1", "padding"
    ),
    # Preferences
    "preference-column": Broken("preference", {"chosen": "a"}, "no column 'rejected'", "columns"),
    "preference-same": Broken("preference", {**PREF, "rejected": "yes"}, "are the same", "remove"),
    "preference-prompt": Broken(
        "preference", {**PREF, "prompt": 7}, "'prompt' holds int", "repair"
    ),
    "preference-no-prompt": Broken(
        "preference", {"chosen": "a", "rejected": "b"}, "no column 'prompt'", "columns"
    ),
    "preference-answers": Broken(
        "preference",
        {"chosen": [USER, SAID], "rejected": [USER]},
        "'rejected' has no message",
        "re",
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["Say yes, no, hello, good"], 280)
    made.add_special_tokens({"bos_token": "<s>"})
    made.chat_template = templates.MISTRAL
    return made


@each("kind", BROKEN)
def test_broken_data_is_named_and_leaves_no_cache(tokenizer: Any, tmp_path: Path, kind: str):
    broken = BROKEN[kind]
    file, cache = tmp_path / broken.name, tmp_path / "cache"
    where = broken.where
    if isinstance(broken.data, bytes):
        file.write_bytes(broken.data)
    elif callable(broken.data):
        broken.data(file)
    else:
        lines = [GOOD[broken.kind], broken.data, GOOD[broken.kind]]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = SourceConfig(path=str(file), type=broken.kind, **broken.keys)
    with pytest.raises(DataError) as caught:
        prepare(open_source(source), Encoder(source, tokenizer), cache, progress=lambda _: None)
    error = caught.value
    if "rows cannot be trained on" in error.what:  # several rows of one file, listed
        assert f"{file}:1: " in error.what
    else:
        assert error.where == f"{file}{where}"
    assert broken.what in error.what and broken.fix in error.fix, str(error)
    assert len(error.what.splitlines()[0]) < 400
    left = [entry.name for entry in cache.iterdir() if entry.is_dir()]
    assert left == [] and not list(cache.rglob("*.bin"))


def test_the_good_rows_are_good(tokenizer: Any, tmp_path: Path):
    """What stands around the broken rows above is not what is refused."""
    for kind, row in GOOD.items():
        file = tmp_path / f"{kind}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        source = SourceConfig(path=str(file), type=kind)
        prepare(open_source(source), Encoder(source, tokenizer), tmp_path, progress=lambda _: None)
    assert len(list(tmp_path.glob("tokens-*"))) == len(GOOD)


KEYS = sorted({name for names in COLUMNS.values() for name in names})
KEYS += ["conversations", "from", "value", "tool_calls", "function", "arguments", "type"]
ATOMS: list[Any] = [
    None,
    0,
    -1,
    2**70,
    1.5,
    True,
    "",
    "a",
    "user",
    "assistant",
    "[",
    "[1, 2]",
    "{}",
]
ATOMS += ['[{"role": "user", "content": "x"}]', "\ud800", "\n\nHuman: x\n\nAssistant: y", b"ab"]


def anything(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(ATOMS)
    if rng.random() < 0.5:
        return [anything(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): anything(rng, depth - 1) for _ in range(rng.randint(0, 4))}


@each("kind", ["chat", "instruct", "tokens", "preference"])
def test_any_row_is_either_trained_on_or_named(tokenizer: Any, kind: str):
    """No row that JSON or Parquet can hold ends in another error than ours."""
    rng = random.Random(kind)
    rows = [
        {**GOOD[kind], **{rng.choice(KEYS): anything(rng, 3) for _ in range(rng.randint(0, 3))}}
        for _ in range(400)
    ]
    encoder = Encoder(SourceConfig(path="any", type=kind), tokenizer)
    tally = Tally("any", 0.999)
    made = encode_each([Row(f"file:{n}", row) for n, row in enumerate(rows)], encoder, tally)
    documents = [document for one in made for document in one]
    assert tally.num_bad == made.count([]) and 0 < tally.num_bad < 400
    assert all(
        document.trained is not None and document.trained[1:].any() for document in documents
    )


def test_many_bad_rows_are_counted_and_the_first_are_listed(tokenizer: Any, tmp_path: Path):
    file = tmp_path / "a.jsonl"
    rows = [{"messages": []} if n % 3 == 0 else GOOD["chat"] for n in range(3000)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(file), type="chat")

    def error_of(limit: float) -> DataError:
        with pytest.raises(DataError) as caught:
            prepare(
                open_source(source),
                Encoder(source, tokenizer),
                tmp_path / "c",
                progress=lambda _: None,
                max_bad_fraction=limit,
            )
        return caught.value

    few = error_of(0.0)  # nobody waits for the rest of a large file to learn of its first bad rows
    assert "342 of the first 1024 rows" in few.what and f"{file}:28: " in few.what
    error = error_of(0.1)
    assert "1000 of 3000 rows" in error.what and "and 990 more" in error.what
    assert error.what.count("holds no message") == 10 and "it takes 0.34 here" in error.fix

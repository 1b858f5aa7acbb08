"""Broken data files and rows: each is named with its place and a fix, and leaves no cache."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path
from typing import Any

import pytest

from isles.config.sections.data import COLUMNS, SourceConfig
from isles.data.sources.rows import Row, Tally
from isles.data.tokens.encode import Encoder, encode_each
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from tests import chat_templates as templates
from tests.data import prepare_file, write_parquet, write_rows
from tests.each import each

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello"}
TOKENS = {"input_ids": [5, 6, 7]}
PAIR = {"prompt": "Say", "chosen": "yes", "rejected": "no"}
GOOD: dict[str, Any] = {"text": {"text": "good"}, "tokens": TOKENS, "preference": PAIR}
GOOD |= {"chat": {"messages": [USER, SAID]}, "instruct": {"instruction": "Say", "output": "yes"}}


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(["Say yes, no, hello, good"], 280)
    made.add_special_tokens({"bos_token": "<s>"})
    made.chat_template = templates.MISTRAL
    return made


def cut_parquet(path: Path) -> None:
    write_parquet(path, {"text": ["abc"] * 99})
    os.truncate(path, path.stat().st_size - 40)


def misnamed(path: Path) -> None:
    write_parquet(path, {"mesages": ["[]"], "id": [1]})


def not_utf8(path: Path) -> None:
    import pyarrow as pa

    write_parquet(path, {"text": pa.array([b"ok", b"\xff\xfe"]).cast(pa.string(), safe=False)})


CUT_GZIP = gzip.compress(os.urandom(999))[:-20]
CUT_ARRAY = b'[\n{"instruction": "a", "output": "b"},\n{"instr'
ITEMS = b'[{"text": "a"},\n"b"]'
# Kind of the source, name, content or what writes it, and what the error says: what, fix, and what
# follows the file's path in its place.
FILES: list[tuple[Any, ...]] = [
    ("text", "a.txt.gz", CUT_GZIP, "damaged", "gzip -t", ""),
    ("text", "a.txt", b"a\nb\xe9c", "not UTF-8: byte 0xe9", "iconv", ":2"),
    ("chat", "a.json", "[{}]".encode("utf-16"), "not UTF-8", "UTF-16", ":1"),
    ("text", "a.jsonl", b'{"text": "\xe2\x82', "0xe2 at offset 10", "middle of a character", ":1"),
    ("chat", "a.jsonl", b'{"a": 1},', "not JSON: Extra data", "one JSON object", ":1"),
    ("chat", "a.json", b'{\n"messages": []\n}', "not JSON", "a line", ""),
    ("text", "a.jsonl", b'[{"text": "a"},\n', "not JSON", "NAME.json", ":1"),
    ("instruct", "a.json", CUT_ARRAY, "not JSON", "json.tool", ":3"),
    ("text", "a.json", ITEMS, "not a JSON object but str", "objects", " row 2"),
    ("text", "a.parquet", cut_parquet, "damaged", "download it again", ""),
    ("text", "a.parquet", not_utf8, "Invalid UTF8", "download it again", " row 0"),
    (
        "chat",
        "a.parquet",
        misnamed,
        "column 'messages' not found",
        "columns: {messages: mesages}",
        "",
    ),
    ("instruct", "a.csv", b"instruction,output\na,b\nc,d,e\n", "3 cells", "quotes", ":3"),
    ("instruct", "a.csv", b'instruction,output\na,"b"c\n', "not CSV", "quotes", ":2"),
    ("instruct", "a.csv", b"q,output\na,b\n", "column 'instruction' not found", "columns", ":1"),
    ("chat", "a.txt", b"Hello", "plain text, without a column 'messages'", "type: text", ""),
    ("text", "a.txt", b" \n", "is empty", "remove it", ""),
]


def chat(*messages: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


def said(content: Any, **keys: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": content, **keys}]}


BOTH = {"instruction": "a", "output": "b", "prompt": "c", "completion": "d"}
# Of the second row of three: kind, content, and what the error says.
ROWS: list[tuple[str, Any, str, str]] = [
    ("instruct", [1], "not a JSON object but list", "jq"),
    ("text", {"text": "a\ud800"}, "surrogate", "repair"),
    ("text", {"text": None}, "holds null, not text", "text_column"),
    ("text", {"txt": "a"}, "column 'text' not found", "text_column to txt"),
    ("chat", {"message": []}, "column 'messages' not found", "{messages: message}"),
    ("chat", chat(), "does not contain a message", "remove"),
    ("chat", chat({"role": "user", "text": "a"}), "lacks content; it has: role", "content"),
    (
        "chat",
        chat({**USER, "role": "asistant"}),
        "'asistant', which is not the name of a role",
        "assistant",
    ),
    ("chat", chat(USER), "no assistant message to train on (roles: user)", "remove"),
    ("chat", chat(USER, SAID, tools="[1]"), "not a list of tools", "repair"),
    ("chat", said("Hello", tool_calls=3), "tool_calls holds int '3'", "repair"),
    ("chat", said("a\udc00"), "messages[1].content holds half", "repair"),
    ("chat", said([{"type": "image"}]), "part of type 'image'", "repair"),
    ("chat", said(" \n"), "the assistant's message is empty", "remove"),
    ("instruct", {"instruction": "a"}, "column 'output' not found", "columns"),
    ("instruct", BOTH, "both instruction and output, and prompt and", "{prompt: prompt}"),
    ("tokens", {"input_ids": [5, 999]}, "999, but the tokenizer has only", "name"),
    ("tokens", {"input_ids": [5, 2**70]}, "not a token id", "repair"),
    ("tokens", {"input_ids": []}, "is empty", "remove"),
    ("tokens", {"input_ids": [5]}, "no token of this row is trained", "remove"),
    (
        "tokens",
        {**TOKENS, "labels": [-100, 6]},
        "labels has 2 numbers, but the row has 3",
        "repair",
    ),
    ("tokens", {**TOKENS, "labels": [6, 7, -100]}, "labels[0] is 6, but input_ids[0]", "shift"),
    ("tokens", {**TOKENS, "attention_mask": [1, 0, 1]}, "one contiguous block of 1s", "padding"),
    ("preference", {"chosen": "a"}, "column 'rejected' not found", "columns"),
    ("preference", {"chosen": "a", "rejected": "b"}, "column 'prompt' not found", "columns"),
    ("preference", {**PAIR, "rejected": "yes"}, "are the same", "remove"),
    ("preference", {"chosen": [USER, SAID], "rejected": [USER]}, "'rejected' has no", "remove"),
]
FILES += [
    (kind, "a.jsonl", [GOOD[kind], row, GOOD[kind]], what, fix, ":2")
    for kind, row, what, fix in ROWS
]


@each(*FILES)
def test_what_is_broken_is_named_and_leaves_no_cache(
    kind, name, data, what, fix, where, *, tokenizer, tmp_path
):
    file, cache = tmp_path / name, tmp_path / "cache"
    if isinstance(data, list):
        write_rows(file, data)
    elif isinstance(data, bytes):
        file.write_bytes(data)
    else:
        data(file)
    with pytest.raises(DataError) as caught:
        prepare_file(tokenizer, file, cache, type=kind)
    error = caught.value
    if "rows cannot be trained on" in error.what:  # several rows of one file, listed
        assert f"{file}:1: " in error.what
    else:
        assert error.where == f"{file}{where}"
    assert what in error.what and fix in error.fix, str(error)
    assert len(error.what.splitlines()[0]) < 400
    assert not [entry.name for entry in cache.iterdir() if entry.is_dir()]
    assert not list(cache.rglob("*.bin"))


def test_a_column_that_is_named_and_not_there(tokenizer, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"messages": ["[]"], "tool": ["[]"]})
    with pytest.raises(DataError, match="column 'tols' not found") as caught:
        prepare_file(tokenizer, file, tmp_path / "c", type="chat", columns={"tools": "tols"})
    assert "{tools: tool}" in caught.value.fix


KEYS = sorted({name for names in COLUMNS.values() for name in names})
KEYS += ["conversations", "from", "value", "tool_calls", "function", "arguments", "type"]
ATOMS: list[Any] = [None, 0, -1, 2**70, 1.5, True, "", "a", "user", "assistant", "\ud800", b"ab"]
ATOMS += ["[", "[1, 2]", "{}", '[{"role": "user", "content": "x"}]', "\n\nHuman: x\n\nAssistant: y"]


def anything(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(ATOMS)
    if rng.random() < 0.5:
        return [anything(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): anything(rng, depth - 1) for _ in range(rng.randint(0, 4))}


@each("chat", "instruct", "tokens", "preference")
def test_any_row_is_either_trained_on_or_named(kind, *, tokenizer):
    """No row that JSON or Parquet can hold ends in another error than ours, or is lost."""
    rng = random.Random(kind)
    rows = [
        {**GOOD[kind], **{rng.choice(KEYS): anything(rng, 3) for _ in range(rng.randint(0, 3))}}
        for _ in range(400)
    ]
    encoder = Encoder(SourceConfig(path="any", type=kind), tokenizer)
    tally = Tally("any", 0.999)
    made = encode_each([Row(f"file:{n}", row) for n, row in enumerate(rows)], encoder, tally)
    remarks = tally.record()["remarks"].items()
    masked = sum(count for remark, count in remarks if "excludes rows" in remark)
    assert tally.num_bad + masked == made.count([]) and 0 < tally.num_bad < 400
    masks = [document.trained for documents in made for document in documents]
    assert all(mask is not None and mask[1:].any() for mask in masks)


def test_many_bad_rows_are_listed_and_few_are_left_out(tokenizer, tmp_path, caplog):
    rows = [{"messages": []} if n % 4 == 0 else GOOD["chat"] for n in range(4000)]
    file = write_rows(tmp_path / "a.jsonl", rows)

    def make(limit: float) -> Any:
        keys = {"type": "chat", "max_bad_fraction": limit}
        return prepare_file(tokenizer, file, tmp_path / "c", **keys)

    # Nobody waits for the rest of a large file to learn of its first bad rows.
    with pytest.raises(DataError, match="256 of the first 1024 rows") as caught:
        make(0.0)
    assert f"{file}:37: " in caught.value.what
    with pytest.raises(DataError, match="1000 of 4000 rows") as caught:
        make(0.1)
    error = caught.value
    assert error.what.count("does not contain a message") == 10 and "and 990 more" in error.what
    assert "it takes 0.25 here" in error.fix
    store = make(0.25)
    assert len(store.document_ends) == 3000
    assert "bad_rows=1000" in caplog.text and f"{file}:37" in caplog.text
    manifest = store.manifest
    assert (manifest["rows"], manifest["bad"], manifest["empty"]) == (4000, 1000, 0)
    assert manifest["first_bad"][0][0] == f"{file}:1"
    with pytest.raises(DataError, match="1000 of 4000 rows"):  # also of what was prepared before
        make(0.0)

"""A tokenizer.json is a program from elsewhere: its growth has a limit, it fails in words."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from isles.data.tokens.steps import check_steps
from isles.data.tokens.tokenizer import encode, load_tokenizer, train_tokenizer
from isles.errors import DataError


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def in_turn(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def charsmap(longest: int) -> dict[str, Any]:
    data = (4).to_bytes(4, "little") + bytes(4) + b"a\0" + b"e" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


GROWING = {
    "one": {"normalizer": replace("e", "e" * 1000)},
    "in turn": {"normalizer": in_turn("normalizers", *[replace("e", "e" * 50)] * 4)},
    "each writes what the next reads": {
        "normalizer": in_turn("normalizers", replace("a", "bb" * 9), replace("b", "cc" * 9))
    },
    "regex": {"normalizer": in_turn("normalizers", *[replace(".", "ee", "Regex")] * 9)},
    "of nothing": {"normalizer": in_turn("normalizers", *[replace("", "x", "Regex")] * 9)},
    "prepend": {"normalizer": {"type": "Prepend", "prepend": "e" * 9999}},
    "charsmap": {"normalizer": charsmap(9999)},
    "decoder": {"decoder": in_turn("decoders", *[replace("e", "e" * 50)] * 4)},
    "nested": {
        "normalizer": in_turn("normalizers", in_turn("normalizers", replace("e", "e" * 999)))
    },
    "many": {"pre_tokenizer": in_turn("pretokenizers", *[{"type": "Whitespace"}] * 9999)},
    "affix": {"model": {"type": "WordPiece", "continuing_subword_prefix": "#" * 9999}},
    "no object": {"normalizer": None, "_": 1},
}
KNOWN = {
    "llama": {
        "normalizer": in_turn(
            "normalizers", {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")
        ),
        "decoder": in_turn(
            "decoders",
            replace("\u2581", " "),
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ),
    },
    "gemma": {"normalizer": replace(" ", "\u2581"), "decoder": replace("\u2581", " ")},
    "qwen": {"normalizer": {"type": "NFC"}},
    "bert": {"normalizer": {"type": "BertNormalizer", "lowercase": True}},
    "clip": {"normalizer": in_turn("normalizers", {"type": "NFC"}, replace(r"\s+", " ", "Regex"))},
    "albert": {
        "normalizer": in_turn(
            "normalizers",
            replace("``", '"'),
            replace("''", '"'),
            {"type": "NFKD"},
            charsmap(33),
            replace(" {2,}", " ", "Regex"),
        )
    },
    "punctuation": {
        "normalizer": in_turn("normalizers", *(replace(c, f" {c} ") for c in ".,;:!?()[]"))
    },
    "none": {"normalizer": None, "pre_tokenizer": None, "decoder": None},
}


def test_a_tokenizer_that_makes_texts_grow_without_bound_is_refused(tmp_path: Path):
    folder = tmp_path / "tokenizer"
    train_tokenizer(["a text"], 260).save_pretrained(folder)
    path = folder / "tokenizer.json"
    plain, wrong = json.loads(path.read_text()), []
    for name, change in {**GROWING, **KNOWN}.items():
        found = "taken"
        path.write_text("[]" if name == "no object" else json.dumps({**plain, **change}))
        try:
            check_steps(path)
        except ValueError:
            found = "refused"
        if (found == "refused") != (name in GROWING):
            wrong.append(f"{name}: {found}")
    assert not wrong
    path.write_text(json.dumps(plain))
    # tokenizer_config.json may name it.
    path.with_name("tokenizer.4.0.0.json").write_text(json.dumps({**plain, **GROWING["in turn"]}))
    with pytest.raises(DataError, match="more than 100 times as long"):
        load_tokenizer(str(folder))


def test_a_rule_that_the_package_gives_up_on_is_told_in_words(tmp_path: Path, capfd):
    train_tokenizer(["a text"], 260).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    found = json.loads(path.read_text())
    endless = {"Regex": r"(?:x*)*y|(\w+\s?)+\W\W\W$"}
    split = {"type": "Split", "pattern": endless, "behavior": "Isolated", "invert": False}
    found["pre_tokenizer"] = in_turn("pretokenizers", split, found["pre_tokenizer"])
    path.write_text(json.dumps(found))
    try:
        tokenizer = load_tokenizer(str(tmp_path))
        with pytest.raises(DataError, match="gives up on a text"):
            encode(tokenizer, ["word " * 9 + "e" * 60])
    except DataError as error:
        assert "gives up on a text" in error.what
    capfd.readouterr()  # the package tells it to the terminal, too

"""A tokenizer.json is a program from elsewhere: its growth has a limit, it fails in words."""

from __future__ import annotations

import base64
import gc
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from isles.config.foreign import check_folder
from isles.data.tokens.steps import check_steps
from isles.data.tokens.tokenizer import encode, load_tokenizer, train_tokenizer
from isles.errors import DataError, UserError
from isles.train.data import write_tokenizer
from tests.each import each
from tests.engines import fake_run


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
    "much text": {
        "normalizer": in_turn("normalizers", *(replace(f"{n}" * 60, "e") for n in range(400)))
    },
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


def named(path: Path) -> dict[str, dict[str, Any]]:
    """Values of a tokenizer_config.json that would open this file, or write outside a folder."""
    file = str(path)
    keys = ("vocab", "merges", "gguf_file", "tokenizer_object", "init_inputs", "entity_vocab")
    return {
        **{key: {key: file} for key in keys},
        "vocab as data": {"vocab": {"a": 0}},
        "positional": {"init_inputs": [file]},
        "merges_file": {"merges_file": file},
        "vocab_file": {"vocab_file": file},
        "nested": {"sp_model_kwargs": {"model_file": file}},
        "listed": {"resources": [[file]]},
        "from here": {"config_path": os.path.relpath(file)},
        "versions below": {"fast_tokenizer_files": ["sub/tokenizer.1.0.0.json"]},
        "versions elsewhere": {"fast_tokenizer_files": [file]},
        "versions": {"fast_tokenizer_files": "tokenizer.json"},
        "template": {"chat_template": {"default": "x", file: "y"}},
        "template above": {"chat_template": {"../../x": "y"}},
        "templates": {"chat_template": [{"name": "../x", "template": "y"}]},
        "no name": {"chat_template": [{"template": "y"}]},
        "no text": {"chat_template": {"default": 7}},
        "number": {"chat_template": 7},
    }


HONEST: dict[str, dict[str, Any]] = {
    "llama": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "chat_template": "{{ messages }}",
    },
    "t5": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_ids": 100,
        "additional_special_tokens": ["<extra_id_0>"],
        "name_or_path": "t5-small",
        "special_tokens_map_file": "/home/author/.cache/x",
        "sp_model_kwargs": {},
    },
    "bert": {
        "do_lower_case": True,
        "vocab_file": "/home/author/vocab.txt",
        "tokenizer_file": "/home/author/tokenizer.json",
        "strip_accents": None,
    },
    "mistral": {"vocab_file": None, "tokenizer_file": None, "legacy": True, "pad_token": "/"},
    "qwen": {"errors": "replace", "split_special_tokens": False, "eos_token": "<|endoftext|>"},
    "gemma": {"chat_template": [{"name": "default", "template": "{{ messages }}"}]},
    "phi": {"auto_map": {}, "chat_template": {"default": "a", "tool_use": "b"}},
    "own folder": {"name_or_path": "/", "tokenizer_file": "/etc/passwd"},
    "versions": {"fast_tokenizer_files": ["tokenizer.json"]},
}


def test_a_tokenizer_names_no_file_of_this_machine(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("[UNK]\nTOPSECRET\n")
    folder = tmp_path / "tokenizer"
    train_tokenizer(["a text"], 260).save_pretrained(folder)
    plain = json.loads((folder / "tokenizer_config.json").read_text())
    wrong = []
    for name, change in {**named(secret), **HONEST}.items():
        found = "taken"
        (folder / "tokenizer_config.json").write_text(json.dumps({**plain, **change}))
        try:
            load_tokenizer(str(folder))
        except UserError as error:
            found = str(error)
        if (found == "taken") != (name in HONEST) or "cannot load the tokenizer" in found:
            wrong.append(f"{name}: {found}")
    assert not wrong, "\n".join(wrong)
    (folder / "tokenizer_config.json").write_text(json.dumps(plain))
    (folder / "special_tokens_map.json").write_text(json.dumps({"tokenizer_file": str(secret)}))
    with pytest.raises(UserError, match=r"special_tokens_map\.json tokenizer_file"):
        load_tokenizer(str(folder))


def test_no_file_of_this_machine_becomes_a_vocabulary(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "tokenizer").mkdir()
    tokens = {f"{name}_token": "[UNK]" for name in ("unk", "eos", "pad", "cls", "sep", "mask")}
    for path in (tmp_path / "pipe", "/dev/zero", "/etc/passwd"):
        config = {"tokenizer_class": "BertTokenizer", "vocab": str(path), **tokens}
        (tmp_path / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=r"tokenizer_config\.json vocab"):
            load_tokenizer(str(tmp_path / "tokenizer"))


def test_a_tokenizer_that_cannot_be_written_is_told_in_words(tmp_path: Path):
    folder = tmp_path / "tokenizer"
    train_tokenizer(["a text"], 260).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "note": "\ud800"}))
    config = fake_run(folder)
    with pytest.raises(DataError, match="cannot write the tokenizer"):
        write_tokenizer(config, tmp_path / "run-tokenizer")
    assert [each.name for each in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of two users")
@each("chat_template.jinja", "vocab.txt", "tokenizer.model", "tokenizer_config.json")
def test_a_link_of_another_user_leads_to_no_file_of_mine(name, *, tmp_path):
    (tmp_path / "secret").write_text("{}")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "secret")
    check_folder(folder)  # a link of one's own
    os.lchown(folder / name, 12345, 12345)
    with pytest.raises(UserError, match="another user"):
        check_folder(folder)
    os.chown(tmp_path / "secret", 12345, 12345)
    check_folder(folder)  # as in a cache of models that users share


def test_a_file_that_is_exchanged_after_the_check_is_not_read(tmp_path, monkeypatch):
    """If another user can write to the folder, transformers gets a copy, which then goes."""
    folder, private, copies = tmp_path / "tokenizer", tmp_path / "private", tmp_path / "copies"
    train_tokenizer(["a text of words"] * 9, 300).save_pretrained(folder)
    template = folder / "chat_template.jinja"
    template.write_text("public")
    folder.chmod(0o777)
    private.write_text("private")
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    read = AutoTokenizer.from_pretrained

    def exchange(*args: Any, **more: Any) -> Any:
        template.unlink()
        template.symlink_to(private)
        return read(*args, **more)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", exchange)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.chat_template == "public" and tokenizer.name_or_path == str(folder)
    assert len(list(copies.iterdir())) == 1
    tokenizer = None
    gc.collect()
    assert not list(copies.iterdir())


def test_all_files_of_a_hub_tokenizer_are_fetched_before_the_copy(tmp_path, monkeypatch):
    """Also into a cache that a group may write to, as with umask 002."""
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    train_tokenizer(["a text of words"] * 9, 300).save_pretrained(hub)
    (hub / "chat_template.jinja").write_text("of the hub")
    cache.mkdir()
    cache.chmod(0o775)
    shutil.copy(hub / "tokenizer.json", cache)
    read = AutoTokenizer.from_pretrained

    def from_hub(name: str, **more: Any) -> Any:
        if name == "owner/name":
            shutil.copytree(hub, cache, dirs_exist_ok=True)
            name = str(cache)
        return read(name, **more)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_hub)
    found = [cache / "tokenizer.json"]
    monkeypatch.setattr("isles.data.tokens.tokenizer._fetch", lambda *_: found)
    assert load_tokenizer("owner/name").chat_template == "of the hub"

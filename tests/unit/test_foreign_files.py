"""Files from elsewhere are data: each reader ends in words, within its limits."""

from __future__ import annotations

import errno
import gzip
import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.config.files import find_shape
from isles.config.foreign import model_config, weight_files
from isles.config.sections.model import ModelConfig
from isles.data.chat.template import ChatTemplate
from isles.errors import DataError, UserError
from isles.models import build
from isles.outer.bucket.chain import _decode
from isles.run.records import refusal, used_up
from tests.small_models import small_model

QUESTION = [{"role": "user", "content": "hi"}]
GROWS = "{% set ns = namespace(x='a' * 1000, l=[1], n=9) %}"
LONG, END = "{% for i in range(99999) %}", "{% endfor %}"
FORTY = "{% for i in range(40) %}"
ATTACKS = {
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "loops": LONG + LONG + END + END,
    "condition": LONG + "{% for j in range(99999) if false %}{% endfor %}" + END,
    "times": "{{ 'a' * 10**10 }}",
    "times at once": "{{ 'a' * 10**8 }}",
    "power": GROWS + LONG + "{% set ns.n = ns.n * ns.n %}" + END,
    "tower": "{{ 9**(9**9) }}",
    "width": "{{ '%99999999999d' | format(1) }}",
    "star": "{{ '%*d' % (10**9, 1) }}",
    "field": "{{ '{:>1000000000}'.format(1) }}",
    "field of a field": "{{ '{:>{}}'.format(1, 10**9) }}",
    "doubled text": GROWS + LONG + "{% set ns.x = ns.x ~ ns.x %}" + END,
    "doubled block": GROWS
    + LONG
    + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    + END,
    "doubled list": GROWS + FORTY + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ ns.l }}",
    "doubled by a macro": GROWS
    + "{% macro m() %}{% set ns.l = varargs %}{% endmacro %}"
    + FORTY
    + "{{ m(ns.l, ns.l) }}"
    + END
    + "{{ ns.l }}",
    "deep": GROWS + LONG + "{% set ns.l = (ns.l,) %}" + END + "{{ {ns.l: 1} }}",
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "center": "{{ 'a' | center(10**10) }}",
    "method": "{{ 'a'.zfill(10**10) }}",
    "indent": "{{ ('a\\n' * 100000) | indent('x' * 100000) }}",
    "join": "{{ ('x' * 99999).join(['a'] * 99999) }}",
    "replace": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "tojson": "{{ range(99999) | list | tojson(separators=('x' * 99999, ':')) }}",
    "map": "{{ ['a'] | map('center', 10**10) | list }}",
    "select": "{{ range(99999) | select('in', range(99999) | map('float') | list) | list }}",
    "sum": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "strip": "{{ ('a' * 2000000).strip('b' * 200000 + 'a') }}",
    "brackets": "{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}",
    "digits": "{{ " + "9" * 10**5 + " }}",
    "large": "x" * (2 << 20),
}


def tokenizer(template: str) -> Any:
    return SimpleNamespace(
        chat_template=template,
        get_chat_template=lambda tools=None: template,
        name_or_path="here",
        added_tokens_decoder={},
        all_special_tokens=["</s>"],
        special_tokens_map={"eos_token": "</s>"},
        eos_token="</s>",
    )


def test_a_template_is_refused_before_it_fills_memory_or_time():
    taken = []
    for name, text in ATTACKS.items():
        try:
            taken.append((name, ChatTemplate(tokenizer(text), name).prompt(QUESTION)[:60]))
        except DataError:
            continue
    assert not taken


def test_a_template_does_the_work_that_long_conversations_need():
    text = "{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim | replace('a', 'b') }}"
    text += "{% if loop.index0 == messages | length - 1 %}.{% endif %}\n{% endfor %}"
    messages = [{"role": "user", "content": "a" * 20_000}] * 300
    rendered = ChatTemplate(tokenizer(text), "long").prompt(messages)
    assert rendered.count("b") == 300 * 20_000 and rendered.endswith("b.")


PIECES = st.sampled_from(
    [
        *("{{", "}}", "{%", "%}", "for i in", "endfor", "range(9)", "messages", "set x =", "x"),
        *("'a'", "*", "**", "~", "+", "99", "|", "join", "center", "(", ")", "[", "]", ",", "."),
        *("tojson", "format", "macro m()", "endmacro", "m()", "if", "endif", "%", "==", " "),
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=24).map(" ".join) | st.text(max_size=60))
def test_any_template_renders_or_is_refused_in_words(text: str):
    with suppress(DataError):
        ChatTemplate(tokenizer(text), "any").prompt(QUESTION)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)
KEYS = st.sampled_from(
    ["hidden_size", "num_attention_heads", "vocab_size", "rope_theta", "head_dim"]
)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.dictionaries(KEYS, JSON).map(lambda d: json.dumps(d).encode()))
def test_any_config_and_index_is_read_or_refused_in_words(tmp_path_factory: Any, data: bytes):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    for read in (model_config, weight_files):
        try:
            read(path)
        except (UserError, ValueError) as error:
            assert str(error)


def test_a_config_of_no_model_is_named_with_its_key(tmp_path: Path):
    fine = small_model().config.to_dict()
    wrong: dict[str, Any] = {
        "num_attention_heads": 0,
        "hidden_size": 10**12,
        "vocab_size": -1,
        "rope_theta": 0,
        "head_dim": 0,
        "num_hidden_layers": "2",
        "intermediate_size": True,
        "rms_norm_eps": "small",
        "text_config": {"hidden_size": 0},
        "rope_parameters": {"rope_theta": -1.0},
    }
    taken = []
    for key, value in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps({**fine, key: value}))
        try:
            find_shape(ModelConfig(name_or_path=str(tmp_path)), tmp_path)
            taken.append(key)
        except UserError as error:
            assert key in error.where and error.id == "model.config", error
    for text in ("[" * 100_000, '{"a":' * 200 + "1" + "}" * 200, "[]", "\x00", ""):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            find_shape(ModelConfig(name_or_path=str(tmp_path)), tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="regular file"):
        find_shape(ModelConfig(name_or_path=str(tmp_path)), tmp_path)
    assert not taken


def load(folder: Path, init: Any) -> Any:
    config = ModelConfig(name_or_path=str(folder), init=init)
    cpu = torch.device("cpu")
    return build.build_model(config, device=cpu, dtype=torch.float32, seed=0, vocab_size=None)


def test_a_config_does_not_choose_the_programs_that_compute(tmp_path: Path):
    small_model().save_pretrained(tmp_path)
    fine = json.loads((tmp_path / "config.json").read_text())
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        (tmp_path / "config.json").write_text(json.dumps({**fine, key: "evil/kernels"}))
        for init in ("scratch", "pretrained"):
            assert load(tmp_path, init).config._attn_implementation == "sdpa"


def test_weights_are_files_of_their_folder(tmp_path: Path):
    folder = tmp_path / "model"
    small_model().save_pretrained(folder)
    names = dict.fromkeys(small_model().state_dict(), "../outside.safetensors")
    (folder / "model.safetensors").replace(tmp_path / "outside.safetensors")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="not a file beside it"):
            load(folder, "pretrained")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | JSON.map(lambda v: gzip.compress(json.dumps(v).encode())))
def test_any_entry_of_a_buckets_journal_is_refused_in_words(data: bytes):
    with pytest.raises(UserError, match=r"no entry of a journal|another version"):
        _decode(data, "here")


def test_an_entry_of_a_buckets_journal_is_not_unpacked_without_limit():
    with pytest.raises(UserError, match="longer than an entry can be"):
        _decode(gzip.compress(b" " * (80 << 20), 1), "here")


def test_a_limit_that_is_used_up_is_not_told_as_space(tmp_path: Path):
    numbers = (errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)
    for number in numbers:
        error = OSError(number, os.strerror(number))
        limit = used_up(error, tmp_path)
        assert limit and "free some" not in limit[1], limit
        assert refusal(error, tmp_path) == limit[0] != "there is no space left"

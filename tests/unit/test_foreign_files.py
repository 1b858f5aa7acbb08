"""Files from elsewhere are data: each reader ends in words, within its limits."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

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
DOUBLED = "{% set ns = namespace(t=(1,)) %}" + FORTY + "{% set ns.t = (ns.t, ns.t) %}" + END
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
    "text of numbers": "{{ '%1000000000d' is divisibleby(1) or '%1000000000d' is even }}",
    "long division": "{% set x = 0x"
    + "f" * 100_000
    + " %}"
    + LONG
    + "{% set y = x // (x - 1) %}"
    + END,
    "doubled number": GROWS + LONG + "{% set ns.n = ns.n - (-ns.n) %}" + END,
    "joined stream": "{% set l = ['x' * 10000] * 10000 %}{{ ''.join(l | map('string')) }}",
    "joined backwards": "{% set l = ['x' * 10000] * 10000 %}{{ l | reverse | join }}",
    "joined loop": "{% for i in ['x' * 10000] * 10000 %}{{ loop | join }}" + END,
    "key": DOUBLED + "{{ {}[ns.t] }}",
    "attribute": DOUBLED + "{{ '' | attr(ns.t) }}",
    "found": DOUBLED + "{{ {} is in ns.t or ns.t in {} }}",
    "changed": DOUBLED + FORTY + "{{ loop.changed(ns.t) }}" + END,
    "slices": DOUBLED + "{% set t = ns.t %}" + DOUBLED + "{{ t[:] == ns.t[:] }}",
    "slice in a condition": "{% set x = 'a' * 500000 %}"
    + LONG
    + "{% for j in range(9) if x[1:] is none %}{% endfor %}"
    + END,
    "defaults": "{% macro m(a=["
    + "1, messages, " * 5000
    + "1]) %}{% endmacro %}"
    + LONG
    + "{{ m() }}"
    + END,
    "bound": "{% set x = ('a' * 500000) | safe %}" + LONG + "{{ x.join }}" + END,
    "comments": "{{ (('<!---->' * 100000) | safe).striptags() }}",
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
            taken.append((name, ChatTemplate(tokenizer(text)).prompt(QUESTION)[:60]))
        except DataError:
            continue
    assert not taken


def test_a_template_does_the_work_that_long_conversations_need():
    text = "{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim | replace('a', 'b') }}"
    text += "{% if loop.index0 == messages | length - 1 %}.{% endif %}\n{% endfor %}"
    messages = [{"role": "user", "content": "a" * 20_000}] * 300
    rendered = ChatTemplate(tokenizer(text)).prompt(messages)
    assert rendered.count("b") == 300 * 20_000 and rendered.endswith("b.")


def test_a_template_renders_what_transformers_renders():
    messages = [
        {"role": "system", "content": "  Be good. "},
        {"role": "user", "content": "<b>a&b\n"},
        {"role": "assistant", "content": "<think>hm</think>\nyes", "thinking": "hm"},
    ]
    text = r"""
{{ messages | selectattr('role', 'equalto', 'tool') | map(attribute='content') | join(', ') }}
{% if messages | selectattr('role', 'equalto', 'tool') %}yes{% else %}no{% endif %}
{% set g = messages | map(attribute='role') %}{{ g | join('-') }}{{ g | list }}{{ g is sequence }}
{{ messages | tojson(indent=2) }}{{ messages[1:] | tojson }}{{ messages[0] | items | list }}
{{ messages[2].content.split('</think>')[-1].strip('\n') | upper }}{{ messages[-1]['thinking'] }}
{{ '%s: %5.1f' | format('a', 2.345) }}{{ '{:>8}|{}'.format('a', 1234567890) }}{{ 'a' ~ 1 ~ none }}
{{ 'a' + 'b' * 3 + ('c' | safe) + '<' }}{{ 1 + 2 - 3 * 2 ** 5 // 3 % 4 }}{{ [1] + [2] }}
{% for m in messages if 'think' not in m.content %}{{ loop.index }}/{{ loop.length }}{% endfor %}
{% macro f(t, n=2) %}{% if n %}{{ t }}{{ f(t ~ n, n - 1) }}{% endif %}{% endmacro %}{{ f('x') }}
{% set ns = namespace(s='', n=0) %}{% for m in messages %}{% set ns.s = ns.s + m.role %}{% endfor %}
{{- ns.s }}{{ ns.s.startswith('sys') and 'tem' in ns.s }}{{ {'a': 1, ns.s: 2} }}{{ ns.s | length }}
{{ messages[0].content | trim | replace('good', 'better') | indent(2, true) }}
{% for k, v in messages[0] | dictsort %}{{ k }}={{ v | e }}{% endfor %}
{{ range(3) | reverse | list }}{% filter upper %}a{% endfilter %}{{ dict(a=1).get('a') }}
"""
    want, _ = render_jinja_template([messages], chat_template=text, eos_token="</s>")
    assert ChatTemplate(tokenizer(text)).prompt(messages) == want[0]


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
    template = None
    try:
        template = ChatTemplate(tokenizer(text))
        shown = template.prompt(QUESTION)
    except DataError as error:
        assert error.what and error.where and str(error).strip()
        if template is None:
            return
        with pytest.raises(DataError, match=re.escape(error.what)):
            template.prompt(QUESTION)
    else:
        assert isinstance(shown, str) and template.prompt(QUESTION) == shown
        # transformers renders the same, where it knows all that the template uses.
        want, _ = render_jinja_template([QUESTION], chat_template=text, eos_token="</s>")
        assert shown == want[0]


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
        "rope_scaling": {"rope_type": "yarn", "factor": "x"},
        "hidden_act": {"a": 1},
        "model_type": "../../evil",
        "layer_types": ["x"] * 100_000,
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
    with pytest.raises(UserError, match=r"not an entry of a journal|another version"):
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

"""Cells with JSON text, as CSV files and tables have them, and prompts that answers repeat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isles.errors import DataError
from tests.each import each
from tests.unit.test_given_rows import (
    FORMS,
    KNOWS,
    RESULT,
    A,
    U,
    call,
    encode_row,
    refusal_of,
    text_of,
)

SHARED = [{"from": "human", "value": "Rain?"}]
INSTRUCT: dict[str, Any] = {"type": "instruct"}
PREFERENCE: dict[str, Any] = {"type": "preference"}
NO = {"role": "assistant", "content": "Yes."}


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a CSV file has it."""
    return {k: v if isinstance(v, str) else json.dumps(v, indent=1) for k, v in row.items()}


@each(
    (INSTRUCT, {"prompt": [U], "completion": [A]}),
    (INSTRUCT, {"prompt": SHARED, "completion": "No."}),
    (INSTRUCT, {"prompt": "Rain?", "completion": [A]}),
    (PREFERENCE, {"prompt": [U], "chosen": [A], "rejected": [NO]}),
    (PREFERENCE, {"prompt": "Rain?", "chosen": [A], "rejected": "Yes."}),
    (PREFERENCE, {"chosen": [U, A], "rejected": [U, NO]}),
)
def test_messages_as_json_text_are_messages(kind, row):
    want = encode_row(row, **kind)
    assert want[0][0].endswith("[[No.<|im_end|>]]\n") and "{" not in want[0][0]
    assert encode_row(as_text(row), **kind) == want
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        encode_row(as_text(row), None, **kind)


@each(
    "[1, 2]", '[{"a": 1}]', "[]", "[INST] Why?", '[{"role": 1, "content": ""}]', '[{"role": "user"'
)
def test_other_json_text_stays_text(text):
    for prompt, answer in (("Rain?", text), (text, "No.")):
        chat = {"prompt": prompt, "completion": answer}
        assert f"[[{answer}<|im_end|>]]" in encode_row(chat, **INSTRUCT)[0][0]
        pair = {"prompt": prompt, "chosen": answer, "rejected": "Yes."}
        assert f"[[{answer}<|im_end|>]]" in encode_row(pair, **PREFERENCE)[0][0]


def test_messages_as_json_text_with_a_field_twice_are_refused():
    twice = '[{"role": "user", "content": "a", "content": "b"}]'
    error = refusal_of({"prompt": twice, "completion": "No."}, **INSTRUCT)
    assert "two fields 'content'" in error.what and error.where == "f:1"


@each(
    ('{"x": 1, "x": 2}', "a JSON object has two fields 'x'"),
    ('{"x": {"k": 1, "k": 2}}', "a JSON object has two fields 'k'"),
    ('{"x": NaN}', "the number NaN is not finite"),
    ('{"x": [-Infinity]}', "the number -Infinity is not finite"),
    ('{"x": 1e400}', "the number 1e400 is not finite"),
    ('{"x": 1', "which is not JSON"),
    ("null", "are null, not a JSON object"),
    ("[1]", "are list '[1]', not a JSON object"),
    ("5", "are int '5', not a JSON object"),
    (json.dumps('{"x": 1}'), "not a JSON object (JSON text inside JSON text)"),
    ([1], "are list '[1]', not a JSON object"),
)
def test_arguments_that_an_object_cannot_hold_are_refused_unless_written_as_text(arguments, what):
    chat = [U, call(arguments), RESULT, A]
    error = refusal_of(chat, KNOWS)
    assert error.what.startswith("the arguments of weather are ") and what in error.what
    assert error.where == "f:1" and error.fix.startswith("repair the arguments")
    assert "template" not in error.what
    if isinstance(arguments, str):
        assert f"[[{arguments}weather" in text_of(chat, FORMS["printed"])


OTHER = {"role": "user", "content": "Snow?"}
CALLED = call(), RESULT


@each(
    (
        {"chosen": [U, A], "rejected": [OTHER, NO]},
        "different prompts: chosen[0] is str 'Rain?'",
        "",
    ),
    ({"chosen": [U, A, U, A], "rejected": [U, A, OTHER, NO]}, "different prompts: chosen[2]", ""),
    ({"chosen": [U, A], "rejected": [U, OTHER, NO]}, "rejected[1] is str 'Snow?' (user)", ""),
    (
        {"prompt": "Rain?", "chosen": [OTHER, A], "rejected": [OTHER, NO]},
        "chosen begins with a question: 'Rain?' and 'Snow?'",
        "ignore_fields: [prompt]",
    ),
    ({"prompt": [U], "completion": [OTHER, A]}, "completion begins with a question", ""),
)
def test_answers_to_different_prompts_are_refused(row, what, fix):
    kind = INSTRUCT if "completion" in row else PREFERENCE
    error = refusal_of(row, **kind)
    assert what in error.what and fix in error.fix and error.where == "f:1"
    if fix:
        encode_row(row, **kind, ignore_fields=["prompt"])


@each("Rain? ", "\n Rain?", [U], [{**U, "content": " Rain?", "name": "Ann"}])
def test_a_prompt_that_answers_repeat_counts_once(prompt):
    want = encode_row({"prompt": "Rain?", "chosen": "No.", "rejected": "Yes."}, **PREFERENCE)
    row = {"prompt": prompt, "chosen": [U, A], "rejected": [U, NO]}
    assert encode_row(row, **PREFERENCE) == want
    (asked,), _ = encode_row({"prompt": prompt, "completion": [U, A]}, **INSTRUCT)
    assert asked.count("Rain?") == 1 and asked.endswith("[[No.<|im_end|>]]\n")
    spaced = {"chosen": [U, A], "rejected": [{**U, "content": "Rain? "}, NO]}
    assert encode_row(spaced, **PREFERENCE)[0][0] == want[0][0]
    talks = {"chosen": [U, *CALLED, A], "rejected": [U, *CALLED, NO]}
    assert len(encode_row(talks, KNOWS, **PREFERENCE)[0]) == 2


def test_a_list_of_texts_is_not_content():
    for key, names in (("content", ("user", "assistant")), ("value", ("human", "gpt"))):
        role = "role" if key == "content" else "from"
        for said in (["s1", "s2"], [{"type": "text", "text": "s1"}, "s2"]):
            asked, answer = ({role: name, key: said} for name in names)
            error = refusal_of([asked, answer])
            at = next(number for number, part in enumerate(said) if isinstance(part, str))
            assert f"messages[0].{key}[{at}] holds str" in error.what and error.where == "f:1"
            assert "only parts of type 'text'" in error.what

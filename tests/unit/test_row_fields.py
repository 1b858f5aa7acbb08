"""Fields of rows as public datasets have them: used, named as unread, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isles.check.checks.rows import rows as check_rows
from isles.check.plan import NodePlan
from isles.config.load import load_run_file
from isles.config.sections.data import SourceConfig
from isles.config.sections.run import RunConfig
from isles.data.chat.template import describe_template
from isles.data.show import field_notes
from isles.data.sources.rows import Row, Tally
from isles.data.tokens.encode import Encoder, encode_each
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from isles.train import first_rows
from tests import model_templates as templates
from tests.data import trained_text, write_rows
from tests.each import each

U: dict[str, Any] = {"role": "user", "content": "Rain?"}
A: dict[str, Any] = {"role": "assistant", "content": "No."}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
SHARED = {"human": U["content"], "gpt": A["content"]}

_TOKENIZER: Any = train_tokenizer(["The quick brown fox"], 320)
_TOKENIZER.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})


def encoder(template: str = "QWEN_25", kwargs: Any = None, **source: Any) -> Encoder:
    _TOKENIZER.chat_template = getattr(templates, template)
    describe_template(_TOKENIZER, template, kwargs or {})
    return Encoder(SourceConfig(path="any", **{"type": "chat", **source}), _TOKENIZER)


def outcome(row: dict[str, Any], **source: Any) -> tuple[str, str]:
    """The documents of a row as one text, and the report of unread fields."""
    texts, unread = trained_text(encoder(**source), row)
    return "\n".join(texts), unread


def refusal(row: dict[str, Any], **source: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        outcome(row, **source)
    return caught.value


def turns(*said: tuple[str, str], **last: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"from": who, "value": text} for who, text in said]
    messages[-1] |= last
    return messages


@each(
    # ShareGPT
    ({"conversations": turns(*SHARED.items()), "id": "x_1"}, "id 100 %"),
    ({"conversations": turns(*SHARED.items(), model="m")}, "messages.model 100 %"),
    ({"conversation": turns(*SHARED.items()), "source": "s", "lang": "de"}, "lang source"),
    # OpenAI
    ({"messages": [{**U, "name": "Ann"}, A], "parallel_tool_calls": False}, "name parallel"),
    ({"messages": [U, {**A, "refusal": None, "annotations": []}]}, ""),
    ({"messages": [U, {**A, "audio": {"id": "a"}}]}, "messages.audio 100 %"),
    # Others
    ({"messages": [U, A], "meta": {"score": 1}}, "meta 100 %"),
    ({"messages": [U, A], "images": ["a.png"]}, "images 100 %"),
)
def test_fields_of_public_chats_are_named(row, unread):
    text, found = outcome(row)
    assert "[[No.<|im_end|>]]" in text
    assert all(part in found for part in unread.split()) and bool(found) == bool(unread)


@each(
    ({"conversations": turns(*SHARED.items(), ("human", "Snow?"), ("gpt", "Yes."), loss=False)}),
    ({"conversations": turns(*SHARED.items(), ("human", "Snow?"), ("gpt", "Yes."), weight=0)}),
    ({"messages": [U, A, U, {**A, "content": "Yes.", "trainable": False}]}),
    ({"messages": [U, A, U, {**A, "content": "Yes.", "train_on_turn": 0}]}),
    ({"messages": [U, A, U, {**A, "content": "Yes.", "loss_mask": 0}]}),
    ({"messages": [U, {**A, "masked": False}, U, {**A, "content": "Yes.", "masked": True}]}),
    ({"messages": [{**U, "masked": True}, A, U, {**A, "content": "Yes.", "masked": 1}]}),
)
def test_turns_that_a_field_excludes_are_not_trained(row):
    text, unread = outcome(row)
    assert "[[No.<|im_end|>]]" in text and "Yes." in text and "[[Yes." not in text and not unread


@each(
    ({"weight": 0, "train": True}, "weight: 0 and train: 1"),
    ({"loss": True, "training": False}, "loss: 1 and training: 0"),
    ({"trainable": 1, "weight": 0.0}, "trainable: 1 and weight: 0"),
    ({"train": 1, "masked": True}, "train: 1 and masked: 1"),
    ({"weight": 0, "masked": False}, "weight: 0 and masked: 0"),
)
def test_fields_that_contradict_one_another_are_refused(fields, what):
    row = {"messages": [U, A, U, {**A, "content": "Yes.", **fields}]}
    error = refusal(row)
    said, named = set(what.split(" and ")), error.what.partition(" has ")[2]
    assert all(part in named for part in said) and error.where == "f:1"
    # The printed fix works.
    field = error.fix.partition("{train: ")[2].rstrip("}")
    text, unread = outcome(row, columns={"train": field})
    is_trained = bool(fields[field]) != (field == "masked")
    assert ("[[Yes." in text) == is_trained and len(unread.split(", ")) == 1
    outcome({"messages": [U, {**A, **{name: name != "masked" for name in fields}}]})


@each(
    ({"type": "image_url", "image_url": {"url": "a.png"}}, "'image_url'"),
    ({"type": "input_audio", "input_audio": {"data": ""}}, "'input_audio'"),
    ({"type": "image"}, "'image'"),
)
def test_parts_that_are_no_text_are_refused(part, kind):
    content = [{"type": "text", "text": "Rain?"}, part]
    error = refusal({"messages": [{**U, "content": content}, A]})
    assert f"messages[0].content[1] holds a part of type {kind}" in error.what


@each(
    # LLaMA-Factory: ShareGPT with tools as a string, and Alpaca with system and history.
    (
        {
            "conversations": turns(
                ("human", "Rain?"),
                ("function_call", json.dumps(CALL["function"])),
                ("observation", "dry"),
                ("gpt", "No."),
            ),
            "system": "Be brief.",
            "tools": json.dumps([TOOL["function"]]),
        },
        "chat",
        ("Be brief.", '"name": "weather"', '"city": "Bonn"', "dry", "[[No.<|im_end|>]]"),
    ),
    (
        {
            "instruction": "And Snow?",
            "input": "In Bonn",
            "output": "No.",
            "system": "Be brief.",
            "history": [["Rain?", "Yes."]],
        },
        "instruct",
        ("Be brief.", "Rain?", "[[Yes.<|im_end|>]]", "And Snow?\n\nIn Bonn", "[[No.<|im_end|>]]"),
    ),
    (
        {
            "messages": [
                U,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {
                    "role": "tool",
                    "tool_call_id": "c1",
                    "content": [{"type": "text", "text": "dry"}],
                },
                A,
            ],
            "tools": [TOOL],
        },
        "chat",
        ("weather", "Rain?", '"city": "Bonn"', "dry", "[[No.<|im_end|>]]"),
    ),
    (
        {"prompt": [U], "chosen": [A], "rejected": [{**A, "content": "Yes."}], "tools": [TOOL]},
        "preference",
        ("weather", "Rain?", "[[No.<|im_end|>]]", "weather", "Rain?", "[[Yes.<|im_end|>]]"),
    ),
)
def test_rows_as_other_trainers_have_them(row, kind, parts):
    text, place = outcome(row, type=kind)[0], 0
    for part in parts:
        place = text.find(part, place) + 1
        assert place > 0, part


EARLIER = {"instruction": "Snow?", "output": "No."}


@each(
    (None, {}, ()),
    ([], {}, ()),
    ("", {}, ()),
    ([["Rain?", "Yes."], ["Hail?", "No, no."]], {}, ("Rain?", "Yes.", "Hail?", "No, no.")),
    (json.dumps([["Rain?", "Yes."]]), {"system": "Be brief."}, ("Rain?", "Yes.")),
    ([("Rain?", "Yes.")], {"input": "In Bonn"}, ("Rain?", "Yes.")),
)
def test_earlier_turns_of_an_instruction_are_trained(history, more, said):
    text, unread = outcome({**EARLIER, "history": history, **more}, type="instruct")
    system = more.get("system", "You are a helpful assistant.")
    turns = [f"<|im_start|>system\n{system}<|im_end|>\n"]
    asked = "\n\n".join(["Snow?", *([more["input"]] if "input" in more else [])])
    for question, answer in zip([*said[::2], asked], [*said[1::2], "No."], strict=True):
        turns.append(f"<|im_start|>user\n{question}<|im_end|>\n")
        turns.append(f"<|im_start|>assistant\n[[{answer}<|im_end|>]]\n")
    assert text == "".join(turns) and not unread
    # A prompt and its completion may have the same.
    text_of_prompt = outcome(
        {"prompt": asked, "completion": "No.", "history": history, **more}, type="instruct"
    )[0]
    assert text_of_prompt == text


@each(
    ([["Rain?", "Yes.", "Why?"]], "history[0] holds list"),
    ([["Hail?", "No."], ["Rain?"]], "history[1] holds list"),
    ([[]], "history[0] holds list '[]'"),
    (["Rain?", "Yes."], "history[0] holds str 'Rain?'"),
    ([{"role": "user", "content": "Rain?"}], "history[0] holds dict"),
    ({"Rain?": "Yes."}, "column 'history' holds dict"),
    ([["Rain?", None]], "history[0] holds null, not text"),
    ([["Hail?", "No."], ["Rain?", " "]], "history[1]: the answer is empty"),
    ("Rain?", "column 'history' holds str 'Rain?', which is text but not JSON"),
)
def test_earlier_turns_that_are_no_pairs_are_refused(history, what):
    error = refusal({**EARLIER, "history": history}, type="instruct")
    assert what in error.what and "remove that row" in error.fix and error.where == "f:1"


def called(*calls: str, said: str = "", result: str = "dry", tools: bool = True) -> str:
    """The conversation that QWEN_25 writes."""
    given = json.dumps(TOOL) if tools else ""
    head = outcome({"messages": [U, A], **({"tools": [TOOL]} if tools else {})})[0]
    begin = head[: head.index("<|im_start|>user")]
    assert given in begin
    written = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)
    turns = (
        f"<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n[[{said}{written}<|im_end|>]]\n"
    )
    if result:
        turns += f"<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
    return f"{begin}{turns}<|im_start|>assistant\n[[No.<|im_end|>]]\n"


BONN = '{"name": "weather", "arguments": {"city": "Bonn"}}'
EMPTY_CALL = '{"name": "weather", "arguments": {}}'
DRY = {"role": "function", "name": "weather", "content": "dry"}


@each(
    ({"arguments": '{"city": "Bonn"}'}, "", BONN),
    ({"arguments": {"city": "Bonn"}}, "", BONN),
    ({"arguments": {"city": "Bonn"}}, "Let me look.", BONN),
    ({"parameters": {"city": "Bonn"}}, "", BONN),
    ({"arguments": "{}"}, "", EMPTY_CALL),
    ({"arguments": ""}, "", EMPTY_CALL),
    ({"arguments": None}, "", EMPTY_CALL),
    ({}, "", EMPTY_CALL),
)
def test_calls_in_old_forms_are_trained_as_they_are_now_written(arguments, said, call):
    """`function_call`, `functions` and the role `function`, as OpenAI had them."""
    want = called(call, said=f"{said}\n" if said else "")
    old = {"name": "weather", **arguments}
    for given in (old, json.dumps(old)):
        for functions in ([TOOL["function"]], json.dumps([TOOL["function"]]), TOOL["function"]):
            asks = {"role": "assistant", "content": said or None, "function_call": given}
            row = {"messages": [U, asks, DRY, A], "functions": functions}
            assert outcome(row) == (want, "messages.name 100 %")
    # ShareGPT, whose calls are messages.
    if not said:
        calls = ("human", "Rain?"), ("function_call", json.dumps(old)), ("function", "dry")
        row = {"conversations": turns(*calls, ("gpt", "No."))}
        assert outcome(row) == (called(call, tools=False), "")
        calls = calls[0], ("function_call", json.dumps([old, old])), calls[2]
        row = {"conversations": turns(*calls, ("gpt", "No."))}
        assert outcome(row) == (called(call, call, tools=False), "")


@each(
    ({"function_call": {"arguments": "{}"}}, {}, "function_call[0] holds null, not a call with a"),
    ({"function_call": "weather(Bonn)"}, {}, "function_call[0] holds str 'weather(Bonn)'"),
    ({"function_call": [3]}, {}, "function_call[0]"),
    ({"function_call": {"name": "weather", "arguments": "Bonn"}}, {}, "which is not JSON"),
    ({"function_call": {"name": "weather", "arguments": [1]}}, {}, "not a JSON object"),
    ({"function_call": {"name": "weather", "city": "Bonn"}}, {}, "without arguments, but has city"),
    ({}, {"functions": "weather"}, "column 'functions' holds str"),
    ({}, {"functions": ["weather"]}, "functions[0] holds str"),
    ({}, {"functions": {"weather": {}}}, "column 'functions' holds dict"),
)
def test_calls_in_old_forms_that_are_none_are_refused(fields, columns, what):
    asks = {"role": "assistant", "content": "" if fields else "Yes.", **fields}
    error = refusal({"messages": [U, asks, DRY, A], **columns})
    assert what in error.what and error.fix and error.where == "f:1"


@each(
    ({"mm": 3}, '{"mm": 3}'),
    ([{"mm": 3}, {"mm": 4}], '[{"mm": 3}, {"mm": 4}]'),
    (["dry", "wet"], '["dry", "wet"]'),
    ([[1, 2], []], "[[1, 2], []]"),
    ({"rain": {"mm": None, "is": False}}, '{"rain": {"mm": null, "is": false}}'),
    ({}, "{}"),
    ([], "[]"),
    (3, "3"),
    (2.5, "2.5"),
    ([{"type": "text", "text": "dry"}, {"type": "text", "text": ", warm"}], "dry, warm"),
    ([{"type": "rain", "text": "dry"}], '[{"type": "rain", "text": "dry"}]'),
    ('{"mm": 3}', '{"mm": 3}'),
)
def test_results_of_tools_are_written_as_json(result, text):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL["function"]}]}
    for role in ("tool", "function", "observation"):
        row = {"messages": [U, call, {"role": role, "content": result}, A], "tools": [TOOL]}
        assert outcome(row) == (called(BONN, result=text), "")
    # Of another template, that writes results as JSON itself.
    row["messages"][2]["role"] = "tool"
    found, unread = trained_text(encoder("LLAMA_31"), row)
    written = json.dumps(text) if text[0] not in "[{0123456789" else text
    if isinstance(result, str):
        written = json.dumps(text)
    assert f"ipython<|end_header_id|>\n\n{written}<|eot_id|>" in found[0] and not unread
    assert "[[No.<|eot_id|>" in found[0]


@each(
    (None, "messages[2].content is null"),
    (float("nan"), "float 'nan', which JSON does not have"),
    ({"mm": [float("inf")]}, "content.mm[0] holds float 'inf'"),
    (b"dry", "bytes"),
    ({"at": {1, 2}}, "JSON does not have"),
)
def test_results_of_tools_that_are_no_json_are_refused(result, what):
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    told = {"role": "tool", "tool_call_id": "c1", "content": result}
    error = refusal({"messages": [U, call, told, A], "tools": [TOOL]})
    assert what in error.what and error.fix and error.where == "f:1"


@each(
    ({"prompt": "a", "rejected": "b"}, "preference", "column 'chosen' not found"),
    ({"prompt": "a", "completion": "b", "label": True}, "preference", "column 'chosen' not found"),
    ({"messages": [{**U, "role": "critic"}, A]}, "chat", "not the name of a role"),
    ({"messages": [{**U, "role": "developer"}, A]}, "chat", "content of message 0 (developer)"),
    ({"messages": [U, {**A, "thinking": "It is wet"}]}, "chat", "the thinking of message 1"),
    ({"messages": [U, {**A, "content": None, "refusal": "I cannot"}]}, "chat", "has refusal"),
)
def test_rows_that_cannot_be_trained_say_why(row, kind, what):
    error = refusal(row, type=kind)
    assert what in error.what and error.fix
    if kind == "preference" and "label" in row:  # as answers alone, the label is named
        text, unread = outcome(row, type="instruct")
        assert "[[b<|im_end|>]]" in text and unread == "label 100 %"


@each(
    ("tools", {}, {"functions": [TOOL["function"]]}),
    ("tools", {"tools": "my_tools"}, {"my_tools": [TOOL]}),
    ("system", {"system": "persona"}, {"persona": "Be brief."}),
)
def test_a_field_is_ignored_by_its_key_too(ignored, columns, more):
    row = {"messages": [U, A], **more}
    assert outcome(row, columns=columns)[0] != outcome({"messages": [U, A]})[0]
    text, unread = outcome(row, columns=columns, ignore_fields=[ignored])
    assert text == outcome({"messages": [U, A]})[0] and not unread
    assert not list(notes(row, columns=columns, ignore_fields=[ignored]))


def test_calls_in_old_forms_are_ignored_by_the_printed_name():
    for call in ({"function_call": CALL["function"]}, {"tool_calls": [CALL]}):
        row = {"messages": [U, {**A, **call}]}
        error = refusal(row, template="GRANITE_33")
        assert error.fix.endswith("ignore_fields: [tool_calls]")
        text, unread = outcome(row, template="GRANITE_33", ignore_fields=["tool_calls"])
        assert "No." in text and "Bonn" not in text and not unread


def test_answers_that_begin_otherwise_than_generation_are_named_once(monkeypatch):
    prompts = templates.QWEN_25.rstrip().removesuffix("{%- endif -%}")
    prompts += "{{- '<think>\\n' -}}{%- endif -%}"
    assert prompts.count("add_generation_prompt") == 1
    monkeypatch.setattr(templates, "PROMPTS", prompts, raising=False)
    plain, thinks = {"messages": [U, A]}, {**A, "content": "<think>\nwet\n</think>\n\nNo."}
    own, tally = encoder("PROMPTS"), Tally("any", 0.0)
    encode_each([Row("f:1", row) for row in (plain, plain)], own, tally)
    (note,) = field_notes(0, SourceConfig(path="a", type="chat"), tally.record())
    assert r"prompt ends with '<think>\n', but trained answers begin otherwise (100 %" in note
    own, tally = encoder("PROMPTS"), Tally("any", 0.0)
    encode_each([Row("f:1", {"messages": [U, thinks]})], own, tally)
    assert not list(field_notes(0, SourceConfig(path="a", type="chat"), tally.record()))
    # What the prompt supplies is not trained, also if a message decides it.
    text = outcome({"messages": [U, thinks]}, template="PROMPTS")[0]
    assert "<think>\n[[wet\n</think>" in text
    choice = "'<think></think>' if messages[0].content == '/no_think' else '<think>\\n'"
    monkeypatch.setattr(templates, "PROMPTS", prompts.replace("'<think>\\n'", choice))
    system = {"role": "system", "content": "/no_think"}
    row = {"messages": [system, U, {**A, "content": "<think></think>No."}]}
    assert "<think></think>[[No." in outcome(row, template="PROMPTS")[0]


def test_a_mask_of_a_message_is_not_guessed():
    row = {"messages": [U, A, U, {**A, "content": "Yes.", "mask": True}]}
    assert "messages[3].mask is bool 'True'" in refusal(row).what
    assert "[[Yes." in outcome(row, ignore_fields=["mask"])[0]
    assert "[[Yes." in outcome(row, columns={"train": "mask"})[0]


@each(
    ({"messages": [U, A]}, "chat"),
    ({"prompt": "Rain?", "completion": "No."}, "instruct"),
    ({"prompt": "Rain?", "chosen": "No.", "rejected": "Yes."}, "preference"),
)
def test_rows_that_a_column_excludes_are_not_trained_and_named(row, kind):
    for name, no, yes in (
        ("weight", 0, 1),
        ("weight", 0.0, 1.0),
        ("train", False, True),
        ("trainable", "false", " TRUE"),
        ("weight", "0.0", ""),
        ("masked", True, False),
        ("masked", "1", "0"),
    ):
        rows = [{**row, name: no}, {**row, name: yes}]
        own, tally = encoder(type=kind), Tally("any", 0.0)
        read = [Row("f:1", one) for one in rows]
        first, second = encode_each(read, own, tally)
        assert not first and second and tally.num_empty == 1
        (note,) = field_notes(0, SourceConfig(path="a", type=kind), tally.record())
        value = "1 or true" if name == "masked" else "0 or false"
        assert f"{name}: {value} excludes rows from training (50 % of the rows)" in note
        assert all(encode_each(read, encoder(type=kind, ignore_fields=[name]), Tally("any", 0.0)))
    unclear = ("no", "none", -1, 0.5, [0], [1], {"a": 0}, 2, float("nan"))
    for name in ("weight", "train", "training", "trainable", "masked"):
        for value in unclear:
            error = refusal({**row, name: value}, type=kind)
            assert f"column {name!r} is " in error.what and error.where == "f:1"
            assert error.fix.startswith("write 0 or 1, or ")
            assert error.fix.endswith(f"data.sources.ignore_fields: [{name}]")
            assert "No." in outcome({**row, name: value}, type=kind, ignore_fields=[name])[0]
    for fields in ({"weight": 0, "train": 1}, {"train": True, "masked": True}):
        error = refusal({**row, **fields}, type=kind)
        assert all(f"{name}: {int(value)}" in error.what for name, value in fields.items())
        ignored = error.fix.partition("ignore_fields: [")[2].rstrip("]")
        assert "No." in outcome({**row, **fields}, type=kind, ignore_fields=[ignored])[0]
    assert not notes({**row, "weight": 1, "train": "true", "masked": 0}, type=kind)


@each(
    ("role", {}, {"messages": [U, A]}),
    ("from", {}, {"conversations": turns(*SHARED.items())}),
    ("messages", {}, {"messages": [U, A]}),
    ("messages", {"messages": "talk"}, {"talk": [U, A]}),
    ("chosen", {"type": "preference"}, {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ("text", {"type": "text"}, {"text": "a"}),
)
def test_a_field_that_each_row_needs_is_not_ignored(ignored, more, row):
    source = {"columns": more} if "messages" in more else more
    error = refusal(row, ignore_fields=[ignored], **source)
    assert error.where == "data.sources.ignore_fields" and "delete" in error.fix, error


@each(TOOL, json.dumps(TOOL), [json.dumps(TOOL)], [TOOL])
def test_tools_in_every_form_are_read(tools):
    assert outcome({"messages": [U, A], "tools": tools}) == outcome(
        {"messages": [U, A], "tools": [TOOL]}
    )


def notes(*rows: dict[str, Any], **source: Any) -> list[str]:
    own, tally = encoder(**source), Tally("any", 0.0)
    encode_each([Row("f:1", row) for row in rows], own, tally)
    assert not tally.num_bad
    config = SourceConfig(path="rows.jsonl", **{"type": "chat", **source})
    return list(field_notes(3, config, tally.record()))


@each(
    ("scroe", "score"),
    ("messages.modle", "model"),
    ("tool_call", None),
)
def test_ignored_fields_that_no_row_has_are_named(name, near):
    row = {"messages": [U, {**A, "model": "m"}], "score": 1}
    unread, unknown = notes(row, {"messages": [U, A]}, ignore_fields=[name])
    assert unread == (
        "data.sources.3 (rows.jsonl): nothing reads these fields (share of rows): "
        "messages.model 50 %, score 50 %"
    )
    hint = f"; did you mean {near}?" if near else ""
    assert unknown == (
        f"data.sources.3.ignore_fields (rows.jsonl): no row has the field {name}{hint}"
    )
    assert notes(row, ignore_fields=["score", "messages.model"]) == []


def test_variables_that_the_template_does_not_have():
    with pytest.raises(DataError) as caught:
        encoder("QWEN_3", {"enable_thinkin": False})
    assert caught.value.where == "tokenizer.chat_template_kwargs.enable_thinkin"
    assert caught.value.what.endswith("has no variable enable_thinkin; it has: enable_thinking")
    row = {"messages": [U, A]}
    given = {"enable_thinkin": False}
    error = refusal({**row, "chat_template_kwargs": given}, template="QWEN_3")
    assert "did you mean enable_thinking?" in error.what
    assert error.fix.endswith("ignore_fields: [chat_template_kwargs]")
    # A variable for other models is named.
    given = {"enable_thinking": False, "persona": "calm"}
    text, unread = outcome({**row, "chat_template_kwargs": given}, template="QWEN_3")
    assert "</think>\n\n[[No." in text and unread == "chat_template_kwargs.persona 100 %"
    assert not outcome({**row, "chat_template_kwargs": {"thinking": None}})[1]
    encoder("LLAMA_31", {"date_string": "1 Jan 2030", "tools_in_user_message": False})


RUN = """\
name: fields
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 320}
data: {sources: [{path: rows.jsonl, type: chat}, {path: bad.jsonl, type: chat}]}
training: {max_steps: 1, global_batch_size: 2}
"""


def write_run(folder: Path) -> dict[str, Any]:
    (folder / "run.yaml").write_text(RUN)
    write_rows(folder / "rows.jsonl", [{"messages": [U, {**A, "mood": 1}], "score": 1}] * 300)
    write_rows(folder / "bad.jsonl", [{"messages": [U]}])
    loaded = load_run_file(folder / "run.yaml", [])
    return {"config": loaded.config.model_dump(mode="json")}


def test_the_first_rows_are_read_without_preparing_any(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate(write_run(tmp_path)["config"])
    first, bad = first_rows.heads(config)
    assert first["rows"] == 200 and "error" not in first
    assert first["notes"] == [
        "data.sources.0 (rows.jsonl): nothing reads these fields (share of rows): "
        "messages.mood 100 %, score 100 %"
    ]
    assert "bad.jsonl:1: " in bad["error"]["what"] and bad["error"]["fix"]
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "rows.jsonl", "bad.jsonl"}


@pytest.mark.long
def test_check_looks_at_the_first_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path)
    found = list(check_rows(NodePlan("here", run=run)))
    assert [(finding.level, finding.measured) for finding in found] == [
        ("warning", "first 200 rows"),
        ("error", "first 1 rows"),
    ], found
    assert "messages.mood 100 %, score 100 %; of the first 200 rows" in found[0].text
    assert found[1].text.startswith("data.sources.1 (bad.jsonl): ")
    assert list(check_rows(NodePlan("there", is_first=False, run=run))) == []

"""What the fields of a row become: each is used, or named as unread, or refused with its reason."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from isles.config.sections.data import SourceConfig
from isles.data.chat import fields
from isles.data.chat.template import chat_prompt, describe_template, use_template
from isles.data.sources.names import unread_message
from isles.data.sources.rows import Row, Tally
from isles.data.tokens.encode import Encoder, encode_each
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from tests import chat_templates as templates
from tests import model_templates
from tests.data import prepare_file, trained_text, write_rows
from tests.each import each

START, END = "{{- '<|im_start|>' + m.role + '\\n' -}}", "{{- '<|im_end|>\\n' -}}"
PROMPT = (
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{{- PREFIX -}}{%- endif -%}"
)


def template_of(body: str, *, before: str = "", prompts: str = "''") -> str:
    """A template that writes each message `m` by this body."""
    end = PROMPT.replace("PREFIX", prompts)
    return f"{before}{{%- for m in messages -%}}{START}{body}{END}{{%- endfor -%}}{end}"


PLAIN = template_of("{{- (m.content or '') -}}")
CALLS = "{%- for c in m.tool_calls or [] -%}{{- CALL -}}{%- endfor -%}"
TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}"
    "{%- endif -%}"
)
AS_JSON = CALLS.replace("CALL", "'<call>' + c.function.name + (c.function.arguments | tojson)")
KNOWS = template_of("{{- m.content or '' -}}" + AS_JSON, before=TOOLS)
THOUGHTS = template_of("{{- '<think>' + (m.reasoning_content or '') + '</think>' + m.content -}}")

U: dict[str, Any] = {"role": "user", "content": "Rain?"}
A: dict[str, Any] = {"role": "assistant", "content": "No."}
RESULT: dict[str, Any] = {"role": "tool", "content": "dry"}
WEATHER = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": WEATHER}


def call(arguments: Any = '{"city": "Bonn"}', **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}], **more}


_TOKENIZER: Any = train_tokenizer(["The quick brown fox"], 320)
_TOKENIZER.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})


def encode_row(
    row: dict[str, Any], template: str | None = PLAIN, *, kwargs: Any = None, **source: Any
) -> tuple[list[str], str]:
    """Each document of a row, trained stretches in [[ ]], and the report of unread fields."""
    tokenizer = _TOKENIZER
    tokenizer.chat_template = template
    describe_template(tokenizer, "given.jinja", kwargs or {})
    config = SourceConfig(path="any", **{"type": "chat", **source})
    return trained_text(Encoder(config, tokenizer), row)


def text_of(row: Any, template: str | None = PLAIN, **more: Any) -> str:
    row = {"messages": row} if isinstance(row, list) else row
    return encode_row(row, template, **more)[0][0]


def refusal_of(row: Any, template: str | None = PLAIN, **more: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        text_of(row, template, **more)
    return caught.value


def test_fields_that_nothing_reads_are_named_with_their_share_of_rows(tmp_path):
    _TOKENIZER.chat_template = KNOWS
    said = {**A, "mood": "calm", "tool_calls": [{**call()["tool_calls"][0], "id": "c1"}]}
    parts = [{"type": "text", "text": "Rain?", "cache": 1}]
    rows = [
        {"messages": [U, A], "source": "web", "id": 1},
        {"messages": [U, said], "source": "web", "conversations": [U, A]},
        {"messages": [{"role": "user", "content": parts}, A], "source": "", "tools": [TOOL]},
        {"messages": [{**U, "name": "Ann"}, A], "source": "web", "system": None, "extra": {}},
    ]
    tally = Tally("any", 0.0)
    encoder = Encoder(SourceConfig(path="any", type="chat"), _TOKENIZER)
    encode_each([Row("f:1", row) for row in rows], encoder, tally)
    assert tally.num_bad == 0
    assert set(unread_message(tally.record()).split(", ")) == {
        *("source 75 %", "id 25 %", "conversations 25 %", "messages.mood 25 %"),
        *("messages.tool_calls.id 25 %", "messages.content.cache 25 %", "messages.name 25 %"),
    }
    ignored = [*("source", "id", "mood", "cache", "name"), "conversations"]
    _, unread = encode_row(rows[1], KNOWS, ignore_fields=ignored)
    assert unread == ""
    for kind, row in (
        ("text", {"text": "a b", "title": "t"}),
        ("tokens", {"input_ids": [5, 6], "title": "t"}),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c", "title": 1}),
        ("instruct", {"prompt": "a", "completion": "b", "title": "t", "output": "x"}),
    ):
        tally = Tally("any", 0.0)
        encoder = Encoder(SourceConfig(path="any", type=kind), _TOKENIZER)
        encode_each([Row("f:1", row, ["score"])], encoder, tally)
        wanted = {"title", "score"} | ({"output"} if kind == "instruct" else set())
        assert set(tally.record()["unread"]) == wanted, kind


@each(
    ([U, {**call(), "content": "Let me look."}, RESULT, A], "the call of weather in message 1"),
    ([U, call(), RESULT, A], "the call of weather in message 1"),
    ({"messages": [U, A], "tools": [TOOL]}, "does not write the tools, such as weather"),
    ({"messages": [U, A], "functions": [WEATHER]}, "does not write the tools, such as weather"),
    (
        [U, {**A, "reasoning_content": "It is wet"}],
        "does not write the reasoning_content of message 1",
    ),
    ([U, {**A, "thinking": "It is wet"}], "does not write the thinking of message 1"),
    ([{"role": "system", "content": "Be brief"}, U, A], "the content of message 0 (system)"),
    ([U, {"role": "tool", "content": "dry"}, A], "the content of message 1 (tool)"),
)
def test_a_part_that_the_template_leaves_out_is_refused_with_its_key(row, what):
    knows_two = PLAIN.replace(
        "for m in messages", "for m in messages if m.role in 'user assistant'"
    )
    error = refusal_of(row, knows_two)
    assert what in error.what and "given.jinja" in error.what and error.where == "f:1"
    named = error.fix.partition("data.sources.ignore_fields: [")[2].rstrip("]")
    if named:  # the printed fix works
        if named == "tool_calls":
            row = [message for message in row if message["role"] != "tool"]
        text = text_of(row, knows_two, ignore_fields=[named, "functions"])
        assert "weather" not in text and "wet" not in text and "[[No.<|im_end|>]]" in text


def test_columns_of_tables_that_nobody_fetches_are_named(tmp_path, caplog):
    import datasets

    rows = [{"messages": [{**U, "note": "n"}, A], "source": "web"}, {"messages": [U, A]}]
    dataset = datasets.Dataset.from_list([{**row, "id": 1} for row in rows])
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    write_rows(tmp_path / "a.jsonl", [{**row, "id": 1} for row in rows])
    _TOKENIZER.chat_template = PLAIN
    caplog.set_level("INFO")
    shown = {}
    for name in ("a.parquet", "saved", "a.jsonl"):
        store = prepare_file(_TOKENIZER, tmp_path / name, tmp_path / "cache", type="chat")
        shown[name] = {*unread_message(store.manifest).split(", ")}
    notes = {"id 100 %", "messages.note 50 %"}
    assert shown["a.parquet"] == shown["saved"] == notes | {"source 100 %"}
    assert shown["a.jsonl"] == notes | {"source 50 %"}
    assert caplog.text.count("that nothing reads (share of rows): id 100 %, ") == 3
    prepare_file(_TOKENIZER, tmp_path / "a.jsonl", tmp_path / "cache", type="chat")
    assert caplog.text.count("that nothing reads (share of rows): id 100 %, ") == 4


def test_text_beside_calls_must_be_written_too():
    only_calls = template_of(
        "{%- if m.tool_calls -%}" + AS_JSON + "{%- else -%}{{- m.content -}}{%- endif -%}"
    )
    error = refusal_of([U, {**call(), "content": "Let me look."}], only_calls)
    assert "the content of message 1 (assistant), which also has a call" in error.what
    assert error.fix.endswith("ignore_fields: [content]")
    text = text_of(
        [U, {**call(), "content": "Let me look."}], only_calls, ignore_fields=["content"]
    )
    assert '[[<call>weather{"city": "Bonn"}<|im_end|>]]' in text and "Rain?" in text
    assert '[[<call>weather{"city": "Bonn"}<|im_end|>]]' in text_of([U, call()], only_calls)


def test_the_last_thought_is_trained_and_old_ones_are_named():
    last_only = THOUGHTS.replace("m.reasoning_content", "loop.last and m.reasoning_content")
    thinks = {**A, "reasoning_content": "wet"}
    (text,), unread = encode_row({"messages": [U, thinks]}, last_only)
    assert "[[<think>wet</think>No.<|im_end|>]]" in text and not unread
    (text,), unread = encode_row({"messages": [U, thinks, U, {**A, "reasoning": "dry"}]}, last_only)
    assert "wet" not in text and "<think>dry</think>" in text
    assert unread == "messages.reasoning_content 100 %"
    # A thought that is written in the answer, and that a template cuts off.
    qwen = templates.QWEN_3
    rows = [U, {**A, "content": "<think>\nwet\n</think>\n\nNo."}, U, A]
    (text,), unread = encode_row({"messages": rows}, qwen)
    assert "wet" not in text and unread == "parts of messages.content 100 %"


@each(
    ("weight", 0, 1),
    ("weight", 0.0, 1.0),
    ("train", False, True),
    ("loss", 0, None),
    ("training", False, True),
    ("my_flag", False, True),
)
def test_turns_that_the_data_excludes_are_not_trained(field, no, yes):
    chat = [U, {**A, field: no}, U, {**A, "content": "Yes.", field: yes}]
    columns = {"train": field} if field == "my_flag" else {}
    marked = template_of(
        "{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content[:1] -}}"
        "{%- endgeneration -%}{%- generation -%}{{- m.content[1:] -}}{%- endgeneration -%}"
        "{%- else -%}{{- m.content -}}{%- endif -%}"
    )
    for template in (PLAIN, marked):
        (text,), unread = encode_row({"messages": chat}, template, columns=columns)
        assert "[[No." not in text and "[[Yes." in text and not unread
    text = text_of([*chat[2:], *chat[:2]], columns=columns, train_on="last")
    assert "[[Yes." in text and "[[No." not in text
    rows = {"prompt": [U], "completion": [*chat[1:]]}
    assert "[[No." not in text_of(rows, type="instruct", columns=columns)
    error = refusal_of(chat, columns=columns, train_on="all")
    assert "train_on: all" in error.what and "[[No." in text_of(chat, ignore_fields=[field])
    assert "excludes every assistant message" in refusal_of(chat[:2], columns=columns).what


def test_a_weight_between_is_refused_and_one_of_a_question_is_named():
    error = refusal_of([U, {**A, "weight": 0.5}])
    assert "messages[1].weight is float '0.5'" in error.what and "[weight]" in error.fix
    _, unread = encode_row({"messages": [{**U, "weight": 1}, A]})
    assert unread == "messages.weight 100 %"
    _, unread = encode_row({"messages": [{**U, "weight": 0}, A]})
    assert unread == ""


def test_history_comes_before_the_question():
    row = {"instruction": "And Italy?", "output": "Rome.", "system": "Be brief"}
    turns = [["Capital of France?", "Paris."]]
    asked = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "And Italy?"}]
    for given in (
        {**row, "history": turns},
        {**row, "history": json.dumps(turns)},
        {"prompt": asked, "completion": "Rome.", "history": turns},
        {"prompt": asked[1:], "completion": "Rome.", "history": turns, "system": "Be brief"},
    ):
        text = text_of(given, type="instruct")
        places = [text.find(part) for part in ("brief", "France?", "Paris.", "And Italy?", "Rome")]
        assert places == sorted(places) and places[0] > 0
        assert "[[Paris.<|im_end|>]]" in text and "[[Rome.<|im_end|>]]" in text
    history = json.dumps(turns)
    last = text_of({**row, "history": history}, type="instruct", train_on="last")
    assert "[[Paris." not in last and "[[Rome." in last
    named = text_of({**row, "old": history}, type="instruct", columns={"history": "old"})
    assert "Paris." in named
    for odd in (["a"], [["a"]], "x", {"a": 1}, [[1, 2]]):
        assert "history" in refusal_of({**row, "history": odd}, type="instruct").what
    assert "chat template" in refusal_of({**row, "history": history}, None, type="instruct").what
    assert "Paris." not in text_of({**row, "history": []}, type="instruct")


def test_tools_of_preferences_and_completions():
    row = {"tools": [TOOL], "prompt": [U], "chosen": [call()], "rejected": [A]}
    texts, _ = encode_row(row, KNOWS, type="preference")
    texts += encode_row(
        {"tools": json.dumps([TOOL]), "prompt": [U], "completion": [call()]}, KNOWS, type="instruct"
    )[0]
    row = {"functions": [WEATHER], "prompt": "Rain?", "completion": "No."}
    texts += encode_row(row, KNOWS, type="instruct")[0]
    for text in texts:
        assert text.startswith("<|im_start|>system\n") and "weather" in text.split("<|im_end|>")[0]
    assert len(texts) == 4
    for kind, answers in (
        ("preference", {"chosen": "a", "rejected": "b"}),
        ("instruct", {"completion": "a"}),
    ):
        row = {"tools": [TOOL], "prompt": "Rain?", **answers}
        assert "does not write the tools" in refusal_of(row, type=kind).what
        assert "'tools' is for a chat template" in refusal_of(row, None, type=kind).what


def test_a_prompt_is_kept_where_the_answers_have_a_system_message():
    system = {"role": "system", "content": "Be brief"}
    row = {"prompt": [U], "chosen": [system, A], "rejected": [system, {**A, "content": "Yes."}]}
    chosen, _ = encode_row(row, type="preference")[0]
    assert "Rain?" in chosen and chosen.index("brief") < chosen.index("Rain?")


OLD = {"name": "weather", "arguments": '{"city": "Bonn"}'}


@each(
    ({"role": "assistant", "content": None, "function_call": OLD}, "function"),
    ({"from": "function_call", "value": json.dumps(OLD)}, "observation"),
    ({"from": "tool_call", "value": json.dumps([OLD])}, "tool_response"),
    ({"role": "assistant", "content": "", "tool_calls": [OLD]}, "tool"),
    ({"role": "assistant", "tool_calls": json.dumps([{"id": "1", "function": OLD}])}, "tool"),
)
def test_calls_in_old_forms_are_calls_of_the_assistant(message, result):
    key = "from" if "from" in message else "role"
    said = "value" if key == "from" else "content"
    rows = [
        {key: "human", said: "Rain?"},
        message,
        {key: result, said: "dry"},
        {key: "gpt", said: "No."},
    ]
    text = text_of(rows, KNOWS)
    assert '[[<call>weather{"city": "Bonn"}<|im_end|>]]' in text and "tool\ndry" in text


@each(
    ("asistant", "write assistant"),
    ("User", "write user"),
    ("function_results", "use one of"),
    ("narrator", "use one of"),
    ("tool_use", "use one of"),
)
def test_the_fix_of_an_unknown_role_never_changes_what_is_trained(role, fix):
    error = refusal_of([U, {"role": role, "content": "x"}, A], KNOWS)
    assert error.fix.startswith(fix) and "write function" not in error.fix


IN_NONE = "{%- if m.content is none -%}" + CALLS + "{%- else -%}{{- m.content -}}{%- endif -%}"
FORMS = {
    "printed": template_of(
        "{{- m.content or '' -}}" + CALLS.replace("CALL", "c.function.arguments ~ c.function.name")
    ),
    "added": template_of(
        "{{- m.content or '' -}}"
        + CALLS.replace("CALL", "c.function.name + ' ' + c.function.arguments")
    ),
    "none": template_of(IN_NONE.replace("CALL", "c.function.name + ' ' + c.function.arguments")),
    "json": KNOWS,
    "missing": template_of(
        "{%- if m.content is defined -%}{{- m.content -}}{%- else -%}" + AS_JSON + "{%- endif -%}"
    ),
    "either": template_of(
        "{{- m.content or '' -}}"
        + CALLS.replace(
            "CALL",
            "c.function.name + (c.function.arguments if c.function.arguments is string"
            " else (c.function.arguments | tojson))",
        )
    ),
}


@each(*FORMS)
def test_arguments_and_content_have_the_form_that_the_template_wants(name):
    for arguments in ('{"city": "Bonn"}', {"city": "Bonn"}):
        for content in (None, ""):
            chat = [U, {**call(arguments), "content": content}, RESULT, A]
            text = text_of(chat, FORMS[name])
            assert text.count('{"city": "Bonn"}') == 1 and "weather" in text
            assert "{'city'" not in text and '\\"' not in text


def test_arguments_stay_as_the_data_has_them():
    odd = '{"b":1,  "a": null, "é": "ß"}'
    assert odd in text_of([U, call(odd), RESULT, A], FORMS["printed"])
    assert odd in text_of([U, call(json.loads(odd))], KNOWS).replace('"b": 1, ', '"b":1,  ')
    xml = CALLS.replace("CALL", "c.function.name")[: -len("{%- endfor -%}")] + (
        "{%- for k, v in c.function.arguments.items() -%}{{- '<' + k + '>' + v -}}{%- endfor -%}"
        "{%- endfor -%}"
    )
    assert "[[weather<city>Bonn<|im_end|>]]" in text_of(
        [U, call()], template_of("{{- m.content -}}" + xml)
    )
    error = refusal_of([U, call()], template_of("{{- m.content ~ (m.tool_calls | string) -}}"))
    assert "as JSON" in error.what
    names_only = CALLS.replace("CALL", "c.function.name")
    error = refusal_of([U, call()], template_of("{{- m.content or '' -}}" + names_only))
    assert "does not write arguments of weather in message 1" in error.what


@each({"rain": False, "mm": [1, 2]}, [{"day": 1}], [], 17, ["a", "b"])
def test_results_of_tools_need_not_be_text(result):
    chat = [U, call(), {"role": "tool", "content": result}, A]
    as_json = KNOWS.replace(
        "m.content or ''", "m.content if m.content is string else (m.content | tojson)"
    )
    for template in (KNOWS.replace("m.content or ''", "m.content"), as_json):
        assert f"tool\n{json.dumps(result) if result != ['a', 'b'] else ''}" in text_of(
            chat, template
        )
    parts = [{"type": "text", "text": "dry"}, {"type": "text", "text": "!"}]
    chat[2] = {"role": "tool", "content": parts}
    assert "tool\ndry!" in text_of(chat, KNOWS)


def test_null_that_json_lines_mean_stays():
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": {"unit": {"default": None}}}},
    }
    text = text_of({"messages": [U, call({"city": "Bonn", "unit": None})], "tools": [tool]}, KNOWS)
    assert '{"default": null}' in text and '{"city": "Bonn", "unit": null}' in text


def test_contents_as_parts_for_templates_that_want_them():
    parts = template_of("{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}")
    text = text_of([{"role": "system", "content": "S"}, U, A, U, A], parts)
    assert text.count("Rain?") == 2 and text.count("[[No.<|im_end|>]]") == 2


NOTHING = "'<think>\\n\\n</think>\\n\\n'"
MODES = template_of(
    "{%- if m.role == 'assistant' and loop.last and enable_thinking is defined"
    " and not enable_thinking -%}{{- EMPTY -}}{%- endif -%}{{- m.content -}}".replace(
        "EMPTY", NOTHING
    ),
    prompts=f"{NOTHING} if enable_thinking is defined and not enable_thinking else ''",
)


def test_variables_of_the_run_and_of_a_row():
    off = {"enable_thinking": False}
    row = {"messages": [U, A, U, A]}
    for text in (
        text_of({**row, "chat_template_kwargs": off}, MODES),
        text_of(
            {**row, "chat_template_kwargs": json.dumps(off)},
            MODES,
            kwargs={"enable_thinking": True},
        ),
        text_of(row, MODES, kwargs=off),
    ):
        assert text.count("<think>") == 1 and text.count("[[No.<|im_end|>]]") == 2
    assert chat_prompt(_TOKENIZER, "Hi").endswith("assistant\n<think>\n\n</think>\n\n")
    text = text_of({**row, "chat_template_kwargs": {"enable_thinking": True}}, MODES, kwargs=off)
    assert "<think>" not in text and text.count("[[No.<|im_end|>]]") == 2
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "chat_template_kwargs": off}
    assert all(
        "[[b<|im_end|>]]" in t or "[[c<|im_end|>]]" in t
        for t in encode_row(pair, MODES, type="preference")[0]
    )
    error = refusal_of({**row, "chat_template_kwargs": {"messages": []}}, MODES)
    assert "sets messages" in error.what
    keys = [Encoder(SourceConfig(path="a", type="chat"), _TOKENIZER).identity()]
    describe_template(_TOKENIZER, "given.jinja", off)
    keys.append(Encoder(SourceConfig(path="a", type="chat"), _TOKENIZER).identity())
    assert keys[0] != keys[1]


def test_an_answer_to_a_result_begins_behind_the_result():
    # As in DeepSeek V3.1: no header of its own, and no generation prompt.
    body = (
        "{%- if m.role == 'user' -%}{{- '<|im_start|>' + m.content -}}"
        "{%- elif m.role == 'tool' -%}{{- '<out>' + m.content + '</out>' -}}"
        "{%- else -%}{%- if messages[loop.index0 - 1].role == 'user' -%}"
        "{{- '<|im_end|></think>' -}}{%- endif -%}{{- m.content or '' -}}"
        + AS_JSON
        + "{{- '</s>' -}}"
        "{%- endif -%}"
    )
    prompt = (
        "{%- if add_generation_prompt and messages[-1].role == 'user' -%}"
        "{{- '<|im_end|></think>' -}}{%- endif -%}"
    )
    template = f"{{%- for m in messages -%}}{body}{{%- endfor -%}}{prompt}"
    chat = [U, call(), {"role": "tool", "content": "wet"}, A, U, A]
    assert text_of(chat, template).replace("<|endoftext|>", "") == (
        '<|im_start|>Rain?<|im_end|></think>[[<call>weather{"city": "Bonn"}</s>]]'
        "<out>wet</out>[[No.</s>]]<|im_start|>Rain?<|im_end|></think>[[No.</s>]]"
    )


def test_every_function_of_the_date_gives_one_day(monkeypatch):
    before = "{{- strftime_now('%Y-%m-%d %H') ~ ' ' ~ date_string -}}"
    dated = template_of("{{- m.content -}}", before=before)
    assert text_of([U, A], dated).startswith("2024-07-26 00 26 Jul 2024")
    wide = template_of("{{- m.content -}}", before="{{- strftime_now('%99999Y') -}}")
    assert "wider" in refusal_of([U, A], wide).what
    assert fields.FIXED_DAY.tzinfo is None


def test_the_built_in_template_says_what_it_lacks():
    tokenizer = train_tokenizer(["abc"], 320, is_chat=True)
    use_template(tokenizer, "chatml")
    for row, what in (
        ([U, {**A, "reasoning_content": "wet"}], "does not write the reasoning_content"),
        ([U, {**call(), "content": "Let me look."}], "no form for tool_calls"),
        ({"messages": [U, A], "tools": [TOOL]}, "no form for tools"),
    ):
        error = refusal_of(row, tokenizer.chat_template)
        assert what in error.what
        named = error.fix.partition("ignore_fields: [")[2].rstrip("]")
        text_of(row, tokenizer.chat_template, ignore_fields=[named])


@each(["ts", "source"], ["messages.ts", "source"])
def test_fields_are_ignored_by_the_names_that_are_shown(ignored):
    row = {"messages": [{**U, "ts": 1}, A], "source": "web"}
    assert "messages.ts" in encode_row(row, KNOWS)[1] and "source" in encode_row(row, KNOWS)[1]
    assert encode_row(row, KNOWS, ignore_fields=ignored)[1] == ""


def test_the_fix_for_calls_names_the_tools_too():
    row = {"messages": [U, {**call(), "content": "I look."}, RESULT, A], "tools": [TOOL]}
    assert "ignore_fields: [tools, tool_calls]" in refusal_of(row, PLAIN).fix
    assert "[[No." in text_of(row, PLAIN, ignore_fields=["tools", "tool_calls"])


@each(
    ([U, call({"file": b"ab"}), RESULT, A], "messages[1].tool_calls[0].function.arguments.file"),
    ([U, call(), {**RESULT, "content": {"took": timedelta(1)}}, A], "messages[2].content.took"),
    ({"messages": [U, A], "tools": [{**TOOL, "icon": b"ab"}]}, "tools[0].icon"),
    ({"messages": [U, A], "chat_template_kwargs": {"a": b"ab"}}, "chat_template_kwargs.a"),
    ([{**U, "image": b"ab"}, A], "messages[0].image"),
)
def test_values_that_json_does_not_have_are_refused_by_name(row, name):
    for template in (KNOWS, FORMS["printed"]):
        assert f"{name} holds " in refusal_of(row, template).what
    if name.endswith("image"):
        assert "[[No." in text_of(row, ignore_fields=["image"])


CITY = {"city": "Bonn"}


@each(
    {"role": "assistant", "tool_calls": [{"name": "weather", "parameters": CITY}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "weather"}, "parameters": CITY}]},
    {"role": "assistant", "function_call": {"name": "weather", "parameters": json.dumps(CITY)}},
    {"role": "function_call", "content": json.dumps({"name": "weather", "parameters": CITY})},
)
def test_parameters_of_a_call_are_its_arguments(message):
    text, unread = encode_row({"messages": [U, message, RESULT, A]}, KNOWS)
    assert '[[<call>weather{"city": "Bonn"}<|im_end|>]]' in text[0] and not unread


def test_a_call_without_arguments_has_nothing_else():
    for arguments in (None, "", " \n", {}):
        assert "[[<call>weather{}<|im_end|>]]" in text_of([U, call(arguments), RESULT, A], KNOWS)
    odd = {"name": "weather", "input": CITY, "function": "x"}
    error = refusal_of([U, {"role": "assistant", "tool_calls": [odd]}, RESULT, A], KNOWS)
    assert "messages[1].tool_calls[0] calls weather without arguments, but has input" in error.what
    assert "ignore_fields: [input]" in error.fix
    for row in (odd, {"function": odd}, json.dumps(odd)):
        chat = [U, {"role": "assistant", "tool_calls": [row]}, RESULT, A]
        (text,), unread = encode_row({"messages": chat}, KNOWS, ignore_fields=["input"])
        assert "[[<call>weather{}<|im_end|>]]" in text and "input" not in unread
    for given in (call(), {"role": "function_call", "content": json.dumps(OLD)}):
        text = text_of([U, given, RESULT, A], KNOWS, ignore_fields=["arguments"])
        assert "[[<call>weather{}<|im_end|>]]" in text


@each("{city: Bonn", "[1]", '"Bonn"', "Bonn")
def test_arguments_that_are_no_object_are_refused_unless_they_are_written_as_text(arguments):
    error = refusal_of([U, call(arguments), RESULT, A], KNOWS)
    assert "arguments of weather are " in error.what and error.where == "f:1"
    assert "repair" in error.fix
    assert f"[[{arguments}weather" in text_of([U, call(arguments), RESULT, A], FORMS["printed"])


CUTS = template_of(
    "{%- if m.role == 'assistant' -%}{{- m.content.split('</think>')[-1] -}}"
    "{%- else -%}{{- m.content -}}{%- endif -%}"
)
SPACES = template_of("{{- m.content | replace('\\n', '') -}}")
QUOTES = template_of("{{- m.content | replace('<', '&lt;') -}}")


def test_a_trained_answer_is_written_whole():
    thinks = {**A, "content": "<think>\nwet\n</think>\n\nNo."}
    for chat in ([U, thinks], [U, thinks, U, A]):
        error = refusal_of(chat, CUTS)
        assert "does not write a part of the content of message 1 (assistant)" in error.what
        assert "'think' of '<think>" in error.what and "tokenizer.chat_template" in error.fix
    for chat, how in (
        ([U, {**thinks, "weight": 0}, U, A], {}),
        ([U, thinks, U, A], {"train_on": "last"}),
    ):
        (text,), unread = encode_row({"messages": chat}, CUTS, **how)
        assert "[[No." in text and "parts of messages.content" in unread
    assert encode_row({"messages": [U, thinks]}, SPACES)[1] == ""
    assert encode_row({"messages": [U, thinks]}, model_templates.GLM_45)[1] == ""
    assert "parts of" in encode_row({"messages": [U, thinks]}, QUOTES)[1]

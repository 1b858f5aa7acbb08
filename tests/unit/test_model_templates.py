"""Templates in the manner of published models: the assistant is trained, and nobody else."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from isles.config.sections.data import SourceConfig
from isles.data.chat.template import describe_template
from isles.data.tokens.encode import Encoder
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from tests import model_templates as templates
from tests.data import trained_text
from tests.each import each

S: dict[str, Any] = {"role": "system", "content": "Be brief."}
U: dict[str, Any] = {"role": "user", "content": "Rain?"}
A: dict[str, Any] = {"role": "assistant", "content": "No."}
U2: dict[str, Any] = {"role": "user", "content": "Snow?"}
A2: dict[str, Any] = {"role": "assistant", "content": "Yes."}
PROPERTIES = {"city": {"type": "string", "description": "name"}}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": WEATHER}]
BONN, ROME = '{"city": "Bonn"}', '{"city": "Rome"}'


def call(*given: Any, content: str | None = None, **more: Any) -> dict[str, Any]:
    """A message with a call for each of these arguments; None: a call without arguments."""
    functions = [{"name": "weather", "arguments": one} for one in given]
    for function in functions:
        if function["arguments"] is None:
            del function["arguments"]
    calls = [
        {"id": f"functions.weather:{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def result(number: int = 0, content: str = "dry") -> dict[str, Any]:
    own = {"tool_call_id": f"functions.weather:{number}", "name": "weather"}
    return {"role": "tool", "content": content, **own}


def thinks(answer: dict[str, Any], thought: str = "It is wet") -> dict[str, Any]:
    return {**answer, "reasoning_content": thought}


ROWS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [S, U, A, U2, A2]},
    "calls": {"messages": [U, call(BONN), result(), A, U2, A2]},
    "objects": {
        "messages": [S, U, call(json.loads(BONN), content=""), result(), A],
        "tools": json.dumps(TOOLS),
    },
    "moved tools": {"messages": [U, call(BONN), result(), A, U2, A2], "tools": TOOLS},
    "two": {"messages": [U, call(BONN, ROME), result(), result(1, "wet"), A], "tools": TOOLS},
    "in turn": {"messages": [S, U, call(BONN), result(), call(ROME), result(), A]},
    "last": {"messages": [U, call(BONN)], "tools": TOOLS},
    "none": {"messages": [U, call(None), result(), A]},
    "text": {"messages": [U, call(BONN, content="Let me look."), result(), A]},
    "thought": {"messages": [U, thinks(A)]},
    "thoughts": {"messages": [U, thinks(A), U2, thinks(A2, "cold")]},
    "thought and call": {"messages": [U, thinks(call(BONN), "ask"), result(), thinks(A)]},
    "off": {"messages": [U, A, U2, A2], "chat_template_kwargs": {"enable_thinking": False}},
    "thought and off": {
        "messages": [U, thinks(A)],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "parts": {
        "messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in (S, U, A)]
    },
    "developer": {"messages": [{**S, "role": "developer"}, U, A]},
}


@cache
def tokenizer_for(name: str) -> Any:
    template = getattr(templates, name)
    tokenizer = train_tokenizer(["The quick brown fox"], 320)
    tokens = re.findall(r"<\|[a-zA-Z_]+\|?>|<[a-z_]+\|>|\[/?[A-Z_]+\]|</?[a-z_]+>", template)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*tokens, '<|"|>'})})
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    tokenizer.chat_template = template
    describe_template(tokenizer, name, {})
    return tokenizer


@cache
def encoder_for(name: str, **source: Any) -> Encoder:
    return Encoder(SourceConfig(path="any", type="chat", **source), tokenizer_for(name))


def spans_of(text: str) -> list[str]:
    return re.findall(r"\[\[(.*?)\]\](?!\])", text, re.DOTALL)


def hermes(given: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {given}}}\n</tool_call>'


def llama(given: str) -> str:
    return f'{{"name": "weather", "parameters": {given}}}<|eot_id|>'


def gemma(city: str) -> str:
    return f'<|tool_call>call:weather{{city:<|"|>{city}<|"|>}}<tool_call|>'


def mistral(*given: str) -> str:
    calls = [
        f'{{"name": "weather", "arguments": {one}, "id": "weather:{i}"}}'
        for i, one in enumerate(given)
    ]
    return f"[TOOL_CALLS] [{', '.join(calls)}]<eos>"


def phi(given: str) -> str:
    return f'<|tool_call|>{{"name": "weather", "arguments": {given}}}<|/tool_call|>'


def deepseek(*given: str) -> str:
    calls = [f"<|call_begin|>weather<|sep|>{one}<|call_end|>" for one in given]
    return f"<|calls_begin|>{''.join(calls)}<|calls_end|><eos>"


def glm(city: str) -> str:
    pair = f"<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>"
    return f"\n<tool_call>weather\n{pair}\n</tool_call>"


def kimi(*given: str) -> str:
    calls = [
        f"<|call_begin|>functions.weather:{i}<|call_argument_begin|>{one}<|call_end|>"
        for i, one in enumerate(given)
    ]
    return f"<|calls_begin|>{''.join(calls)}<|calls_end|><|im_end|>"


def harmony(given: str) -> str:
    return f" to=functions.weather<|channel|>commentary json<|message|>{given}<|call|>"


def final(text: str, end: str = "<|end|>") -> str:
    return f"<|channel|>final<|message|>{text}{end}"


EMPTY = "<think>\n\n</think>\n\n"
NOTHING = "\n<think></think>"
ANALYSIS = "<|channel|>analysis<|message|>It is wet<|end|><|start|>assistant"
CHATML = ["No.<|im_end|>", "Yes.<|im_end|>"]
THOUGHT = "does not write the reasoning_content of message 1 | reasoning_content"
NO_CALLS = "does not write the call of weather in message 1 |"
NO_TOOLS = "does not write the tools, such as weather | tools"
ALTERNATE = "must alternate |"
APART = "apart from its calls | content"
BESIDE = "does not write the content of message 1 (assistant), which also has a call | content"
NO_DEVELOPER = "does not write the content of message 0 (developer) |"
MODE = "its generation prompt ends with"

EXPECTED: dict[str, dict[str, list[str] | str]] = {
    "LLAMA_31": {
        "chat": ["No.<|eot_id|>", "Yes.<|eot_id|>"],
        "calls": [llama(BONN), "No.<|eot_id|>", "Yes.<|eot_id|>"],
        "objects": [llama(BONN), "No.<|eot_id|>"],
        "two": "Only one call at once! |",
        "in turn": [llama(BONN), llama(ROME), "No.<|eot_id|>"],
        "last": [llama(BONN)],
        "none": [llama("{}"), "No.<|eot_id|>"],
        "text": BESIDE,
        "thought": THOUGHT,
        "off": ["No.<|eot_id|>", "Yes.<|eot_id|>"],
        "developer": ["No.<|eot_id|>"],
    },
    "QWEN_25": {
        "chat": CHATML,
        "calls": [f"{hermes(BONN)}<|im_end|>", *CHATML],
        "objects": [f"{hermes(BONN)}<|im_end|>", "No.<|im_end|>"],
        "two": [f"{hermes(BONN)}\n{hermes(ROME)}<|im_end|>", "No.<|im_end|>"],
        "in turn": [f"{hermes(BONN)}<|im_end|>", f"{hermes(ROME)}<|im_end|>", "No.<|im_end|>"],
        "last": [f"{hermes(BONN)}<|im_end|>"],
        "none": [f"{hermes('{}')}<|im_end|>", "No.<|im_end|>"],
        "text": [f"Let me look.\n{hermes(BONN)}<|im_end|>", "No.<|im_end|>"],
        "thought": THOUGHT,
        "developer": NO_DEVELOPER,
    },
    "QWEN_3": {
        "chat": ["No.<|im_end|>", f"{EMPTY}Yes.<|im_end|>"],
        "calls": [f"{hermes(BONN)}<|im_end|>", "No.<|im_end|>", f"{EMPTY}Yes.<|im_end|>"],
        "two": [f"{hermes(BONN)}\n{hermes(ROME)}<|im_end|>", f"{EMPTY}No.<|im_end|>"],
        "last": [f"{EMPTY}{hermes(BONN)}<|im_end|>"],
        "text": [f"Let me look.\n{hermes(BONN)}<|im_end|>", f"{EMPTY}No.<|im_end|>"],
        "thought": ["<think>\nIt is wet\n</think>\n\nNo.<|im_end|>"],
        "thoughts": ["No.<|im_end|>", "<think>\ncold\n</think>\n\nYes.<|im_end|>"],
        "thought and call": [
            f"<think>\nask\n</think>\n\n{hermes(BONN)}<|im_end|>",
            "<think>\nIt is wet\n</think>\n\nNo.<|im_end|>",
        ],
        "off": CHATML,
        "thought and off": f"{MODE} | reasoning_content",
        "parts": [f"{EMPTY}No.<|im_end|>"],
    },
    "GEMMA_3": {
        "chat": ["No.<end_of_turn>", "Yes.<end_of_turn>"],
        "calls": ALTERNATE,
        "text": ALTERNATE,
        "last": NO_CALLS,
        "thought": THOUGHT,
        "parts": ["No.<end_of_turn>"],
        "developer": ALTERNATE,
    },
    "GEMMA_4": {
        "chat": ["No.<turn|>", "Yes.<turn|>"],
        "calls": [f"{gemma('Bonn')}<|tool_response>", "No.<turn|>", "Yes.<turn|>"],
        "two": [f"{gemma('Bonn')}{gemma('Rome')}<|tool_response>", "No.<turn|>"],
        "in turn": [
            f"{gemma('Bonn')}<|tool_response>",
            f"{gemma('Rome')}<|tool_response>",
            "No.<turn|>",
        ],
        "last": [f"{gemma('Bonn')}<|tool_response>"],
        "text": APART,
        "thought and call": [
            f"<|channel>thought\nask\n<channel|>{gemma('Bonn')}<|tool_response>",
            "<|channel>thought\nIt is wet\n<channel|>No.<turn|>",
        ],
        "developer": ["No.<turn|>"],
    },
    "MISTRAL_SMALL_31": {
        "chat": ["No.<eos>", "Yes.<eos>"],
        "calls": [mistral(BONN), "No.<eos>", "Yes.<eos>"],
        "moved tools": [mistral(BONN), "No.<eos>", "Yes.<eos>"],
        "two": [mistral(BONN, ROME), "No.<eos>"],
        "in turn": [mistral(BONN), mistral(ROME), "No.<eos>"],
        "last": [mistral(BONN)],
        "text": BESIDE,
        "thought": THOUGHT,
        "developer": ALTERNATE,
    },
    "PHI_4_MINI": {
        "chat": ["No.<|end|>", "Yes.<|end|>"],
        "calls": [f"{phi(BONN)}<|end|>", "No.<|end|>", "Yes.<|end|>"],
        "two": [f"{phi(BONN)}{phi(ROME)}<|end|>", "No.<|end|>"],
        "last": [f"{phi(BONN)}<|end|>"],
        "text": [f"Let me look.{phi(BONN)}<|end|>", "No.<|end|>"],
        "thought and call": THOUGHT,
    },
    "DEEPSEEK_31": {
        "chat": ["No.<eos>", "Yes.<eos>"],
        "calls": [deepseek(BONN), "No.<eos>", "Yes.<eos>"],
        "objects": NO_TOOLS,
        "in turn": [deepseek(BONN), deepseek(ROME), "No.<eos>"],
        "text": [f"Let me look.{deepseek(BONN)}", "No.<eos>"],
        "none": [deepseek("{}"), "No.<eos>"],
        "off": "did you mean thinking? | chat_template_kwargs",
        "thought": THOUGHT,
    },
    "GLM_45": {
        "chat": [f"{NOTHING}\nNo.", f"{NOTHING}\nYes.<eos>"],
        "calls": [f"{NOTHING}{glm('Bonn')}", f"{NOTHING}\nNo.", f"{NOTHING}\nYes.<eos>"],
        "two": [f"{NOTHING}{glm('Bonn')}{glm('Rome')}", f"{NOTHING}\nNo.<eos>"],
        "text": [f"{NOTHING}\nLet me look.{glm('Bonn')}", f"{NOTHING}\nNo.<eos>"],
        "thoughts": [f"{NOTHING}\nNo.", "\n<think>cold</think>\nYes.<eos>"],
        "off": ["\nNo.", "\nYes.<eos>"],
        "thought and off": f"{MODE} | reasoning_content",
        "parts": [f"{NOTHING}\nNo.<eos>"],
    },
    "KIMI_K2": {
        "chat": CHATML,
        "calls": [kimi(BONN), *CHATML],
        "objects": [kimi(BONN), "No.<|im_end|>"],
        "two": [kimi(BONN, ROME), "No.<|im_end|>"],
        "none": [kimi("{}"), "No.<|im_end|>"],
        "text": [f"Let me look.{kimi(BONN)}", "No.<|im_end|>"],
        "thought": THOUGHT,
    },
    "GPT_OSS": {
        "chat": [final("No."), final("Yes.", "<|return|>")],
        "calls": [harmony(BONN), final("No."), final("Yes.", "<|return|>")],
        "two": NO_CALLS,
        "in turn": [harmony(BONN), harmony(ROME), final("No.", "<|return|>")],
        "last": [harmony(BONN)],
        "none": [harmony("{}"), final("No.", "<|return|>")],
        "text": BESIDE,
        "thought": [ANALYSIS + final("No.", "<|return|>")],
        "thought and call": [harmony(BONN), ANALYSIS + final("No.", "<|return|>")],
        "developer": [final("No.", "<|return|>")],
    },
    "SMOLLM_3": {
        "chat": CHATML,
        "calls": NO_CALLS,
        "thought": THOUGHT,
        "off": CHATML,
    },
    "GRANITE_33": {
        "chat": ["No.<|end_of_text|>", "Yes.<|end_of_text|>"],
        "calls": NO_CALLS,
        "off": "did you mean thinking? | chat_template_kwargs",
        "developer": ["No.<|end_of_text|>"],
    },
    "OLMO_2": {
        "chat": ["No.<eos>", "Yes.<eos>"],
        "text": NO_CALLS,
        "thought": THOUGHT,
    },
}


@each(*((name, what) for name, rows in EXPECTED.items() for what in rows))
def test_exactly_the_assistant_is_trained_or_the_row_is_refused(name, what):
    expected, row = EXPECTED[name][what], ROWS[what]
    if isinstance(expected, list):
        (text,), _ = trained_text(encoder_for(name), row)
        assert spans_of(text) == expected
        if what == "chat":  # the text is that of transformers, but for the day
            plain = tokenizer_for(name).apply_chat_template(row["messages"], tokenize=False)
            days = re.compile(r"\d{4}-\d\d-\d\d|\d\d \w{3,9} \d{4}|\w+ \d\d, \d{4}")
            own = text.replace("[[", "").replace("]]", "")
            if not plain.endswith("<eos>"):
                own = own.removesuffix("<eos>")
            assert days.sub("", own) == days.sub("", plain)
        if what == "calls":
            (text,), _ = trained_text(encoder_for(name, train_on="last"), row)
            assert spans_of(text) == expected[-1:]
        return
    reason, _, ignored = expected.partition(" | ")
    with pytest.raises(DataError) as caught:
        trained_text(encoder_for(name), row)
    assert reason.removesuffix(" |") in caught.value.what and name in caught.value.what
    named = caught.value.fix.partition("data.sources.ignore_fields: [")[2].rstrip("]")
    assert named == ignored
    if named:  # the printed fix works
        (text,), _ = trained_text(encoder_for(name, ignore_fields=tuple(named.split(", "))), row)
        assert spans_of(text)

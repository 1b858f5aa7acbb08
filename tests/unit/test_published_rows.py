"""Rows in the manner of public datasets are trained exactly, or refused with a fix that helps."""

from __future__ import annotations

import json
from typing import Any

from tests.published import Given, array, chat, check, lines, parquet, raw, saved, table

CHAT: dict[str, Any] = {"type": "chat"}
ASKED = [{"role": "user", "content": "Why?"}]
TALK = [*ASKED, {"role": "assistant", "content": "So."}]
SHORT = [chat("user: Why?", "assistant: So.")]
TURNS = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
TOOL = {"name": "rain", "description": "Rain?", "parameters": {"city": {"type": "str"}}}
TOOLS = f"tools: [{json.dumps(TOOL)}]"
CALL = '<tool_call>\n{"name": "rain", "arguments": {"city": "Bonn"}}\n</tool_call>'


def instruct(**columns: str) -> dict[str, Any]:
    return {"type": "instruct", **({"columns": columns} if columns else {})}


def preference(**columns: str) -> dict[str, Any]:
    return {"type": "preference", **({"columns": columns} if columns else {})}


CHATS = (
    Given(  # ShareGPT
        "sg_90k_part1.json",
        array,
        [{"id": "QWJhYvA_0", "conversations": TURNS}, {"id": "i6IyJda_0", "conversations": TURNS}],
        CHAT,
        SHORT * 2,
        "id 100 %",
    ),
    Given(  # OpenAssistant: a row is one message of a tree
        "2023-04-12_oasst_ready.messages.jsonl.gz",
        lines,
        [
            {"message_id": "1", "parent_id": None, "text": "Why?", "role": "prompter"},
            {"message_id": "2", "parent_id": "1", "text": "So.", "role": "assistant"},
        ],
        CHAT,
        ("column 'messages' not found", "join the messages of each conversation into one row"),
    ),
    Given(  # OpenAssistant: a row is one tree
        "2023-11-05_oasst2_ready.trees.jsonl.gz",
        lines,
        [{"message_tree_id": "1", "prompt": {"text": "Why?", "replies": [{"text": "So."}]}}],
        CHAT,
        ("column 'messages' not found", "join the messages of each conversation into one row"),
    ),
    Given(  # UltraChat 200k: a split beside another
        "data/train_sft-00000-of-00003.parquet",
        parquet,
        [{"prompt": "Why?", "prompt_id": "f0e3", "messages": TALK}],
        CHAT,
        SHORT,
        "prompt 100 %, prompt_id 100 %",
        path="data/train_sft-*.parquet",
        beside={"data/test_sft-00000-of-00001.parquet": b"", "README.md": b"---\n", ".git": b""},
    ),
    Given(  # UltraChat: questions and answers in turn, without roles
        "train_0.jsonl",
        lines,
        [{"id": "0", "data": ["Why?", "So."]}],
        {"type": "chat", "columns": {"messages": "data"}},
        ("data[0] holds str 'Why?'", '{"role": "user", "content": '),
    ),
    Given(  # LIMA
        "train.jsonl",
        lines,
        [{"conversations": ["Why?", "So."], "source": "stackexchange"}],
        CHAT,
        ("conversations[0] holds str 'Why?'", '{"role": "user", "content": '),
    ),
    Given(  # Capybara: a turn is a question and its answer
        "CapybaraPure_Decontaminated.jsonl",
        lines,
        [{"source": "Airoboros", "conversation": [{"input": "Why?", "output": "So."}]}],
        CHAT,
        ("conversation[0] lacks role; it has: input, output", '{"role": "user", "content": '),
    ),
    Given(  # SlimOrca
        "oo-labeled_correct.gpt4.sharegpt.jsonl",
        lines,
        [
            {
                "conversations": [
                    {"from": "system", "value": "Be brief.", "weight": None},
                    {"from": "human", "value": "Why?", "weight": 0.0},
                    {"from": "gpt", "value": "So.", "weight": 1.0},
                    {"from": "human", "value": "And?", "weight": 0.0},
                    {"from": "gpt", "value": "No.", "weight": 0.0},
                ]
            }
        ],
        CHAT,
        [chat("system: Be brief.", "user: Why?", "assistant: So.", "user: And?", "masked: No.")],
    ),
    Given(  # OpenHermes 2.5: most fields are null
        "openhermes2_5.json",
        array,
        [
            {
                "custom_instruction": None,
                "topic": None,
                "system_prompt": None,
                "avatarUrl": None,
                "conversations": TURNS,
                "source": "airoboros2.2",
            },
            {"custom_instruction": False, "system_prompt": "Be kind.", "conversations": TURNS},
        ],
        CHAT,
        SHORT * 2,
        "custom_instruction 50 %, source 50 %, system_prompt 50 %",
    ),
    Given(  # OpenHermes 2.5, with its system prompts
        "openhermes2_5.json",
        array,
        [{"system_prompt": "Be kind.", "conversations": TURNS}],
        {"type": "chat", "columns": {"system": "system_prompt"}},
        [chat("system: Be kind.", "user: Why?", "assistant: So.")],
    ),
    Given(  # Magpie
        "data/train-00000-of-00002.parquet",
        parquet,
        [
            {
                "uuid": "b1a2",
                "instruction": "Why?",
                "response": "So.",
                "conversations": TURNS,
                "gen_input_configs": {"temperature": 1.0, "seed": None},
            }
        ],
        CHAT,
        SHORT,
        "gen_input_configs 100 %, instruction 100 %, response 100 %, uuid 100 %",
    ),
    Given(  # Tulu 3, in three parts of different sizes
        "data/train-00000-of-00002.parquet",
        parquet,
        [{"id": "a", "messages": TALK, "source": "ai2/coconot"}] * 5,
        CHAT,
        SHORT * 5,
        "id 100 %, source 100 %",
        path="data/*.parquet",
    ),
    Given("all", saved, [{"messages": TALK, "source": "s"}] * 2, CHAT, SHORT * 2, "source 100 %"),
    Given(  # NuminaMath
        "data/train-00000-of-00005.parquet",
        parquet,
        [{"source": "olympiads", "problem": "Why?", "solution": "So.", "messages": TALK}],
        CHAT,
        SHORT,
        "problem 100 %, solution 100 %, source 100 %",
    ),
    Given(  # no_robots: a column that only some rows have
        "train_sft.jsonl",
        lines,
        [
            {"prompt": "Why?", "messages": TALK, "category": "Chat"},
            {"prompt": "Why?", "messages": [{"role": "system", "content": "Hm."}, *TALK]},
        ],
        CHAT,
        [*SHORT, chat("system: Hm.", "user: Why?", "assistant: So.")],
        "prompt 100 %, category 50 %",
    ),
    Given(  # OpenThoughts
        "data/train-00000-of-00006.parquet",
        parquet,
        [
            {
                "system": "Think.",
                "conversations": [
                    {"from": "user", "value": "Why?"},
                    {"from": "assistant", "value": "<|begin_of_thought|>\n\nHm<|end_of_thought|>"},
                ],
            }
        ],
        CHAT,
        [
            chat(
                "system: Think.",
                "user: Why?",
                "assistant: <|begin_of_thought|>\n\nHm<|end_of_thought|>",
            )
        ],
    ),
    Given(  # glaive function calling v2: a conversation as one text
        "glaive-function-calling-v2.json",
        array,
        [{"system": "SYSTEM: Help.", "chat": "USER: Why?\n\n\nASSISTANT: So. <|endoftext|>\n\n\n"}],
        {"type": "chat", "columns": {"messages": "chat"}},
        ("column 'chat' holds str 'USER: Why?", "set type: text with text_column chat"),
    ),
    Given(
        "glaive-function-calling-v2.json",
        array,
        [{"system": "SYSTEM: Help.", "chat": "USER: Why?\n\n\nASSISTANT: So. <|endoftext|>\n"}],
        {"text_column": "chat"},
        ["[[USER: Why?\n\n\nASSISTANT: So. <|endoftext|>\n<|endoftext|>]]"],
        "system 100 %",
    ),
    Given(  # hermes-function-calling
        "func-calling-singleturn.json",
        array,
        [
            {
                "id": "85f8",
                "conversations": [
                    {"from": "system", "value": "You call."},
                    {"from": "human", "value": "Rain?"},
                    {"from": "gpt", "value": CALL},
                    {"from": "tool", "value": '{"rain": true}'},
                    {"from": "gpt", "value": "Yes."},
                ],
                "tools": json.dumps([TOOL]),
                "category": "IoT",
            }
        ],
        CHAT,
        [
            chat(
                TOOLS,
                "system: You call.",
                "user: Rain?",
                f"assistant: {CALL}",
                'tool: {"rain": true}',
                "assistant: Yes.",
            )
        ],
        "category 100 %, id 100 %",
    ),
    Given(  # ToolACE
        "data.json",
        array,
        [
            {
                "system": "You call.",
                "conversations": [
                    {"from": "user", "value": "Rain?"},
                    {"from": "assistant", "value": '[rain(city="Bonn")]'},
                    {"from": "tool", "value": '[{"name": "rain", "results": {"mm": 3}}]'},
                    {"from": "assistant", "value": "3 mm."},
                ],
            }
        ],
        CHAT,
        [
            chat(
                "system: You call.",
                "user: Rain?",
                'assistant: [rain(city="Bonn")]',
                'tool: [{"name": "rain", "results": {"mm": 3}}]',
                "assistant: 3 mm.",
            )
        ],
    ),
    Given(  # an export of a chat program: a table whose cells hold JSON
        "export.tsv",
        lambda path, rows: table(path, rows, delimiter="\t"),
        [{"id": 1, "messages": json.dumps(TALK)}],
        CHAT,
        SHORT,
        "id 100 %",
    ),
    Given(  # numbers where a text should be
        "answers.jsonl",
        lines,
        [{"messages": [*ASKED, {"role": "assistant", "content": 42}]}],
        CHAT,
        ("messages[1].content holds int '42', not text", "repair or remove that row"),
    ),
    Given(  # what pandas writes for a missing answer
        "answers.jsonl",
        lines,
        [{"messages": [*ASKED, {"role": "assistant", "content": float("nan")}]}],
        CHAT,
        ("messages[1].content holds float 'nan', not text", "repair or remove that row"),
    ),
    Given(  # what Parquet makes of messages of which only some have a name and calls
        "messages.parquet",
        parquet,
        [
            {
                "messages": [
                    {"role": "user", "content": "Rain?", "name": "Ann"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "rain", "arguments": {"at": 1}}}],
                    },
                    {"role": "tool", "content": "no", "tool_call_id": "1"},
                    {"role": "assistant", "content": "No."},
                ],
                "tools": [TOOL],
            },
            {"messages": TALK, "tools": None},
        ],
        CHAT,
        [
            chat(
                TOOLS,
                "user: Rain?",
                'assistant: <call>{"name": "rain", "arguments": {"at": 1}}',
                "tool: no",
                "assistant: No.",
            ),
            *SHORT,
        ],
        "messages.name 50 %, messages.tool_call_id 50 %",
    ),
)

INSTRUCTIONS = (
    Given(  # Alpaca, CodeAlpaca
        "alpaca_data.json",
        array,
        [
            {"instruction": "Why?", "input": "", "output": "So."},
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
        ],
        instruct(),
        [*SHORT, chat("user: Add.\n\n1, 2", "assistant: 3")],
    ),
    Given(  # Dolly, with the names of Alpaca
        "databricks-dolly-15k.jsonl",
        lines,
        [{"instruction": "Why?", "context": "", "response": "So.", "category": "open_qa"}],
        instruct(),
        ("column 'output' not found", "{output: "),
    ),
    Given(
        "databricks-dolly-15k.jsonl",
        lines,
        [{"instruction": "Why?", "context": "Ice.", "response": "So.", "category": "open_qa"}],
        instruct(input="context", output="response"),
        [chat("user: Why?\n\nIce.", "assistant: So.")],
        "category 100 %",
    ),
    Given(  # GSM8K
        "main/train-00000-of-00001.parquet",
        parquet,
        [{"question": "1+1?", "answer": "<<1+1=2>>\n#### 2"}],
        instruct(prompt="question", completion="answer"),
        [chat("user: 1+1?", "assistant: <<1+1=2>>\n#### 2")],
        path="main/train-*.parquet",
        beside={"main/test-00000-of-00001.parquet": b"", "dataset_infos.json": b"{}"},
    ),
    Given(  # MetaMath
        "MetaMathQA-395K.json",
        array,
        [{"type": "MATH", "query": "Why?", "original_question": "Why so?", "response": "So."}],
        instruct(prompt="query", completion="response"),
        SHORT,
        "original_question 100 %, type 100 %",
    ),
    Given(  # xlam function calling: calls and tools are JSON in a text
        "xlam_function_calling_60k.json",
        array,
        [
            {
                "id": 0,
                "query": "Rain?",
                "answers": '[{"name": "rain", "arguments": {"city": "Bonn"}}]',
                "tools": json.dumps([TOOL]),
            }
        ],
        instruct(prompt="query", completion="answers"),
        [
            chat(
                TOOLS,
                "user: Rain?",
                'assistant: [{"name": "rain", "arguments": {"city": "Bonn"}}]',
            )
        ],
        "id 100 %",
    ),
    Given(  # s1K
        "data/train-00000-of-00001.parquet",
        parquet,
        [{"solution": "So.", "question": "Why?", "thinking_trajectories": ["Hm."], "year": None}],
        instruct(prompt="question", completion="solution"),
        SHORT,
        "thinking_trajectories 100 %",
    ),
    Given(  # WizardLM
        "alpaca_evol_instruct_70k.json",
        array,
        [{"output": "So.", "instruction": "Why?"}],
        instruct(),
        SHORT,
    ),
    Given(  # FLAN
        "flan2021_zsopt_data/part.0.jsonl.gz",
        lines,
        [{"inputs": "Why?", "targets": "So.", "task_source": "Flan2021"}],
        instruct(prompt="inputs", completion="targets"),
        SHORT,
        "task_source 100 %",
    ),
    Given(  # P3: ids beside texts
        "train-00000-of-00004.parquet",
        parquet,
        [
            {
                "inputs": [36, 19],
                "inputs_pretokenized": "Why?",
                "targets": [1],
                "targets_pretokenized": "So.",
            }
        ],
        instruct(prompt="inputs_pretokenized", completion="targets_pretokenized"),
        SHORT,
        "inputs 100 %, targets 100 %",
    ),
    Given(
        "super_glue_train.tfrecord-00000-of-00001",
        raw,
        b"\x0a\0\0\0",
        instruct(),
        ("isles does not read .tfrecord files", "JSON lines or Parquet"),
    ),
    Given(  # HelpSteer
        "train.jsonl.gz",
        lines,
        [{"prompt": "Why?", "response": "So.", "helpfulness": 3, "verbosity": 0}],
        instruct(completion="response"),
        SHORT,
        "helpfulness 100 %, verbosity 100 %",
    ),
    Given(  # Aya
        "aya.csv",
        table,
        [{"inputs": 'Say "a",\nb', "targets": "ä; ö", "language": "German"}],
        instruct(prompt="inputs", completion="targets"),
        [chat('user: Say "a",\nb', "assistant: ä; ö")],
        "language 100 %",
    ),
    Given(  # MS MARCO: several answers
        "v2.1/train-00000-of-00007.parquet",
        parquet,
        [{"answers": ["So."], "query": "Why?", "query_id": 1, "passages": {"text": ["a", "b"]}}],
        instruct(prompt="query", completion="answers"),
        ("column 'answers'", "{completion: A_COLUMN_OF_TEXT}"),
    ),
    Given(  # saved by a table program
        "questions.csv",
        lambda path, rows: table(path, rows, delimiter=";"),
        [{"prompt": "Why?", "completion": "So."}],
        instruct(),
        ("separated by semicolons", "write it with commas"),
    ),
    Given(  # KTO: one answer a row, good or bad
        "kto-mix-14k.jsonl",
        lines,
        [{"prompt": ASKED, "completion": TALK[1:], "label": True}],
        instruct(),
        SHORT,
        "label 100 %",
    ),
)

BOTH = [chat("user: Why?", "assistant: So."), chat("user: Why?", "assistant: No.")]
NO = [*ASKED, {"role": "assistant", "content": "No."}]
PREFERENCES = (
    Given(  # UltraFeedback binarized
        "data/train_prefs-00000-of-00001.parquet",
        parquet,
        [{"prompt": "Why?", "chosen": TALK, "rejected": NO, "messages": TALK, "score_chosen": 8.0}],
        preference(),
        BOTH,
        "messages 100 %, score_chosen 100 %",
    ),
    Given(  # HH-RLHF
        "harmless-base/train.jsonl.gz",
        lines,
        [
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant: So.",
                "rejected": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant: No.",
            }
        ],
        preference(),
        [
            chat("user: Hi", "masked: Yes?", "user: Why?", f"assistant: {answer}")
            for answer in ("So.", "No.")
        ],
    ),
    Given(  # Orca DPO
        "orca_rlhf.jsonl",
        lines,
        [{"system": "Hm.", "question": "Why?", "chosen": "So.", "rejected": "No."}],
        preference(prompt="question"),
        [chat("system: Hm.", "user: Why?", f"assistant: {answer}") for answer in ("So.", "No.")],
    ),
    Given(  # SHP: a column says which one is better, and nothing reads it
        "askscience/train.json",
        lines,
        [{"history": "Why?", "human_ref_A": "So.", "human_ref_B": "No.", "labels": 1}],
        preference(prompt="history", chosen="human_ref_A", rejected="human_ref_B"),
        BOTH,
        "labels 100 %",
    ),
    Given(  # Nectar: ranked answers
        "rlaif.parquet",
        parquet,
        [{"prompt": "\n\nHuman: Why?\n\nAssistant: ", "answers": [{"answer": "So.", "rank": 1.0}]}],
        preference(),
        ("column 'chosen' not found", "a better and a worse answer"),
    ),
    Given(  # KTO
        "kto-mix-14k.jsonl",
        lines,
        [{"prompt": ASKED, "completion": TALK[1:], "label": True}],
        preference(),
        ("column 'chosen' not found", "a better and a worse answer"),
    ),
)


def test_chats_of_public_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    check(CHATS, tmp_path)


def test_instructions_of_public_datasets(tmp_path):
    check(INSTRUCTIONS, tmp_path)


def test_preferences_of_public_datasets(tmp_path):
    check(PREFERENCES, tmp_path)

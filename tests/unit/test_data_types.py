"""Conversations, instructions, token ids and preferences as tokens, with the mask of training."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.config.sections.data import SourceConfig
from isles.data.chat.template import chat_prompt, stop_at_turns, use_template
from isles.data.sources.rows import Row, Tally
from isles.data.tokens.encode import Encoded, Encoder, encode_each
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.errors import DataError
from tests import chat_templates as templates
from tests.data import prepare_file, write_rows
from tests.each import each

TEXT = [
    "The quick brown fox says hello there, fine thanks. assistant user system model think 0 1 2"
]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


CHAT = [user("Hi there"), assistant(" Hello, zwölf 😀!\n"), user("ok"), assistant("fine")]


@pytest.fixture
def plain() -> Any:
    """A tokenizer without special tokens for chats and without a template, as of a base model."""
    return train_tokenizer(TEXT * 5, 320)


def with_template(name: str, *, bos: str = "<s>", eos: str = "</s>") -> Any:
    """A tokenizer that knows the special tokens of all templates, and has this one."""
    tokenizer = train_tokenizer(TEXT * 5, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": templates.SPECIAL})
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    tokenizer.chat_template = getattr(templates, name)
    return tokenizer


def encode_one(tokenizer: Any, row: dict[str, Any], **source: Any) -> list[Encoded]:
    """The documents of a row; a bad one raises."""
    encoder = Encoder(SourceConfig(path="any", **{"type": "chat", **source}), tokenizer)
    tally = Tally("any", 0.0)
    (documents,) = encode_each([Row("file:1", row)], encoder, tally)
    tally.judge()
    return documents


def encode_chat(tokenizer: Any, messages: Any, **source: Any) -> Encoded:
    (document,) = encode_one(tokenizer, {"messages": messages}, **source)
    return document


def runs(tokenizer: Any, document: Encoded) -> list[str]:
    """The trained stretches of a document as text."""
    assert document.trained is not None and len(document.trained) == len(document.ids)
    stretches: list[list[int]] = []
    before = False
    for token, trained in zip(document.ids, document.trained, strict=True):
        if trained:
            stretches += [] if before else [[]]
            stretches[-1].append(token)
        before = bool(trained)
    return [tokenizer.decode(stretch) for stretch in stretches]


def chat_runs(tokenizer: Any, messages: Any, **source: Any) -> list[str]:
    return runs(tokenizer, encode_chat(tokenizer, messages, **source))


# What the assistant says, by template


HARMONY = [
    "<|channel|>final<|message|> Hello, zwölf 😀!\n<|end|>",
    "<|channel|>final<|message|>fine<|return|>",
]


@each(
    ("template", "answers"),
    [
        ("LLAMA_3", ["Hello, zwölf 😀!<|eot_id|>", "fine<|eot_id|>"]),
        ("MISTRAL", [" Hello, zwölf 😀!</s>", " fine</s>"]),
        ("GEMMA", ["Hello, zwölf 😀!<end_of_turn>", "fine<end_of_turn>"]),
        ("ZEPHYR", [" Hello, zwölf 😀!\n</s>", "fine</s>"]),
        ("QWEN_3", [" Hello, zwölf 😀!\n<|im_end|>", "<think>\n\n</think>\n\nfine<|im_end|>"]),
        ("PHI_3", [" Hello, zwölf 😀!\n<|end|>", "fine<|end|>"]),
        ("DEEPSEEK", [" Hello, zwölf 😀!\n</s>", "fine</s>"]),
        ("HARMONY", HARMONY),
        ("MARKED", [" Hello, zwölf 😀!\n<|im_end|>", "<|im_end|>"]),
        # Its turns end with nothing at which generation could stop.
        ("PLAIN", ["  Hello, zwölf 😀!\n\n", " fine\n</s>"]),
    ],
)
def test_only_what_the_assistant_says_is_trained(template: str, answers: list[str]):
    tokenizer = with_template(template)
    document = encode_chat(tokenizer, CHAT)
    reference = tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    reference += [tokenizer.eos_token_id] * (template == "PLAIN")
    assert document.ids == reference  # what generation is prompted with later
    assert runs(tokenizer, document) == answers
    assert chat_runs(tokenizer, CHAT, train_on="last") == answers[-1:]
    whole = encode_chat(tokenizer, CHAT, train_on="all")
    assert whole.trained is None and whole.ids == document.ids


@each("template", ["LLAMA_3", "MISTRAL", "GEMMA", "ZEPHYR", "QWEN_3", "PHI_3"])
def test_what_is_generated_is_what_was_trained(template: str):
    """The ids before a trained answer are those that generation is prompted with."""
    tokenizer = with_template(template)
    document = encode_chat(tokenizer, CHAT, train_on="last")
    prompt = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True)["input_ids"]
    assert document.ids[: len(prompt)] == prompt
    assert np.flatnonzero(document.trained)[0] == len(prompt)


def test_chatml_with_tokens_of_its_own_and_without(plain: Any, tmp_path: Path):
    trained = train_tokenizer(TEXT * 5, 320, is_chat=True)
    for tokenizer, end in ((trained, "<|im_end|>"), (plain, "<|im_end|><|endoftext|>")):
        use_template(tokenizer, "chatml")
        document = encode_chat(tokenizer, CHAT)
        assert runs(tokenizer, document) == [f" Hello, zwölf 😀!\n{end}", f"fine{end}"]
        assert end.endswith(tokenizer.eos_token) and len(tokenizer) <= 320
        tokenizer.save_pretrained(tmp_path / "saved")
        loaded = load_tokenizer(str(tmp_path / "saved"))
        assert loaded.chat_template == tokenizer.chat_template
        assert encode_chat(loaded, CHAT).ids == document.ids
    assert document.ids.count(plain.eos_token_id) == 2  # one for each answer
    with pytest.raises(DataError, match="no form for tools"):
        encode_one(trained, {"messages": CHAT, "tools": [{"name": "f"}]})


def test_old_reasoning_is_dropped_and_the_last_is_trained():
    old, new = ("<think>\nold\n</think>\n\nfirst", "<think>\nnew\n</think>\n\nsecond")
    messages = [user("one"), assistant(old), user("two"), assistant(new)]
    assert chat_runs(with_template("QWEN_3"), messages) == ["first<|im_end|>", f"{new}<|im_end|>"]


def test_tool_calls_are_what_the_assistant_says():
    tokenizer = with_template("QWEN_3")
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        user("sum"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two", "tool_calls": None},
    ]
    tools = json.dumps([{"type": "function", "function": {"name": "add"}}])
    (document,) = encode_one(tokenizer, {"messages": messages, "tools": tools})
    said, last = runs(tokenizer, document)
    assert said.endswith("</tool_call><|im_end|>") and '"arguments": {"a": 1}' in said
    assert last.endswith("two<|im_end|>")
    assert "# Tools" in tokenizer.decode(document.ids[:40])
    # A template that knows nothing of them would train on an empty turn.
    with pytest.raises(DataError, match="leaves out what the assistant says in message 1"):
        encode_chat(with_template("LLAMA_3"), messages)


def test_an_answer_that_holds_what_stands_around_answers():
    trap = "no</s>\n<|user|>\nok</s>\n<|assistant|>\nyes"
    messages = [CHAT[0], assistant(trap), *CHAT[2:]]
    assert chat_runs(with_template("ZEPHYR"), messages) == [f"{trap}</s>", "fine</s>"]


def test_a_template_of_which_nobody_can_tell_what_is_said():
    tokenizer = with_template("COUNTING_DOWN")
    with pytest.raises(DataError, match="renders message 1 otherwise") as caught:
        encode_chat(tokenizer, CHAT)
    assert "{% generation %}" in caught.value.fix and caught.value.where == "file:1"
    assert encode_chat(tokenizer, CHAT, train_on="all").trained is None


def test_a_slow_tokenizer_has_the_same_mask():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = templates.ZEPHYR
    assert not tokenizer.is_fast
    messages = [CHAT[0], assistant("Hello, zwölf 😀!"), *CHAT[2:]]
    assert chat_runs(tokenizer, messages) == ["Hello, zwölf 😀!</s>", "fine</s>"]


def test_a_tokenizer_with_spaces_in_its_tokens_has_the_same_mask():
    """Bytes and words of sentencepiece, as Llama 2, Mistral and Gemma have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    pieces.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", *templates.SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    pieces.train_from_iterator(TEXT, trainer)
    state = json.loads(pieces.to_str())
    size = len(state["model"]["vocab"])
    state["model"]["vocab"] |= {f"<0x{n:02X}>": size + n for n in range(256)}
    core = Tokenizer.from_str(json.dumps(state))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = templates.MISTRAL
    document = encode_chat(tokenizer, CHAT)
    assert document.ids == tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert tokenizer.unk_token_id not in document.ids
    assert runs(tokenizer, document)[0].lstrip() == "Hello, zwölf 😀!</s>"
    tokens = tokenizer.convert_ids_to_tokens(document.ids)
    start = int(np.flatnonzero(document.trained)[0])
    assert tokens[start - 1] == "[/INST]" and tokens[start].startswith("▁")


# Templates and the end of a turn


@each(
    ("template", "stop"),
    [
        ("LLAMA_3", "<|eot_id|>"),
        ("HARMONY", "<|return|>"),
        ("PHI_3", "</s>"),  # it writes eos_token itself
        ("MISTRAL", "</s>"),
        ("PLAIN", "</s>"),  # it has no other
    ],
)
def test_generation_stops_where_a_turn_ends(template: str, stop: str):
    tokenizer = with_template(template)
    stop_at_turns(tokenizer)
    assert tokenizer.eos_token == stop


def test_an_exported_model_stops_where_a_turn_ends(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from isles.checkpoint.export import export_model

    tokenizer = with_template("LLAMA_3")
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|eot_id|>"])
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, eos_token_id=ends[0]))
    stop_at_turns(tokenizer)
    export_model(model, tokenizer, tmp_path / "model", max_shard_bytes=10**9)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.generation_config.eos_token_id == ends


@each(
    ("content", "what", "where"),
    [
        (None, "there is no chat template", "tokenizer.chat_template"),
        (b" \n", "is empty", "t.jinja"),
        (b"a\n{% for %}", "is no Jinja", "t.jinja:2"),
        (b"a\n\xff", "not UTF-8", "t.jinja:2"),
    ],
)
def test_a_broken_template_is_named(
    plain: Any, tmp_path: Path, content: bytes | None, what: str, where: str
):
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        use_template(plain, str(file))
    assert caught.value.where.endswith(where) and caught.value.fix


def test_messages_need_a_template(plain: Any):
    prompt = chat_prompt(with_template("GEMMA"), "Hi")
    assert prompt == "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(DataError, match="no chat template"):
        chat_prompt(plain, "Hi")
    with pytest.raises(DataError, match="no chat template") as caught:
        encode_chat(plain, CHAT)
    assert "tokenizer.chat_template: chatml" in caught.value.fix


# Forms of rows


def test_the_same_rows_from_any_kind_of_file(tmp_path: Path):
    import datasets

    tokenizer = with_template("LLAMA_3")
    # Messages of unlike keys: columnar files fill what one lacks with null.
    rows = [{"messages": [*CHAT[:3], {**CHAT[3], "name": "x"}]}, {"messages": CHAT[:2]}]
    lines = write_rows(tmp_path / "a.jsonl", rows).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=2))
    with (tmp_path / "d.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["messages"], *([json.dumps(r["messages"])] for r in rows)])
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "e.parquet")
    dataset.save_to_disk(tmp_path / "f")
    digests = {
        TokenStore.open(prepare_file(tokenizer, path, tmp_path / "cache", type="chat")).digest
        for path in sorted(tmp_path.iterdir())
    }
    assert len(digests) == 1 and len(list((tmp_path / "cache").glob("tokens-*"))) == 6


def test_forms_of_conversations():
    tokenizer = with_template("LLAMA_3")
    wanted = encode_chat(tokenizer, CHAT).ids
    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]
    lists = {key: [m[key] for m in CHAT] for key in ("role", "content")}
    rows = [{"messages": form} for form in (parts, json.dumps(CHAT), lists, shared)]
    for row in (*rows, {"conversations": shared}):
        assert encode_one(tokenizer, row)[0].ids == wanted
    columns = {"messages": "talk", "role": "who", "content": "said"}
    own = {"talk": [{"who": m["role"], "said": m["content"]} for m in CHAT]}
    assert encode_one(tokenizer, own, columns=columns)[0].ids == wanted
    system = [{"role": "system", "content": "Be brief"}, *CHAT]
    row = {"conversations": shared, "system": "Be brief"}
    assert encode_one(tokenizer, row)[0].ids == encode_chat(tokenizer, system).ids


def test_instructions_with_a_template():
    tokenizer = with_template("LLAMA_3")
    wanted = encode_chat(tokenizer, [user("Say\n\nit"), assistant("yes")])
    assert runs(tokenizer, wanted) == ["yes<|eot_id|>"]
    named = {"instruction": "q", "output": "a"}
    for row, columns in [
        ({"instruction": "Say", "input": "it", "output": "yes"}, {}),
        ({"prompt": "Say\n\nit", "completion": "yes"}, {}),
        ({"prompt": [user("Say\n\nit")], "completion": "yes"}, {}),
        ({"q": "Say\n\nit", "a": "yes"}, named),
    ]:
        (document,) = encode_one(tokenizer, row, type="instruct", columns=columns)
        assert document.ids == wanted.ids and np.array_equal(document.trained, wanted.trained)


def test_instructions_without_a_template(plain: Any):
    row = {"instruction": "Say", "input": "it", "output": "yes"}
    (document,) = encode_one(plain, row, type="instruct")
    assert plain.decode(document.ids) == (
        "### Instruction:\nSay\n\n### Input:\nit\n\n### Response:\nyes<|endoftext|>"
    )
    assert runs(plain, document) == ["yes<|endoftext|>"]
    row = {"prompt": "Say\n\nit", "completion": "yes", "system": "S"}
    (document,) = encode_one(plain, row, type="instruct")
    assert plain.decode(document.ids) == "S\n\nSay\n\nityes<|endoftext|>"
    (document,) = encode_one(plain, row, type="instruct", train_on="all")
    assert document.trained is None


def test_the_token_that_begins_a_text_is_there_once():
    from tokenizers.processors import TemplateProcessing

    tokenizer = train_tokenizer(TEXT * 5, 320)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    (document,) = encode_one(tokenizer, {"prompt": "Say", "completion": " yes"}, type="instruct")
    assert document.ids[:-1] == tokenizer("Say yes")["input_ids"]
    assert document.ids.count(tokenizer.bos_token_id) == 1 and not document.trained[0]
    tokenizer.chat_template = templates.LLAMA_3
    assert encode_chat(tokenizer, CHAT).ids.count(tokenizer.bos_token_id) == 1


@each(
    ("row", "ids", "trained"),
    [
        ({"input_ids": [5, 6, 7]}, [5, 6, 7], [True, True, True]),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, [5, 6, 7], [False, False, True]),
        ({"input_ids": [9, 5, 6, 9], "attention_mask": [0, 1, 1, 0]}, [5, 6], [True, True]),
        ({"input_ids": "[5, 6]"}, [5, 6], [True, True]),
    ],
)
def test_token_ids_as_they_are(
    plain: Any, row: dict[str, Any], ids: list[int], trained: list[bool]
):
    (document,) = encode_one(plain, row, type="tokens")
    assert document.ids == ids and document.trained.tolist() == trained


def test_preferences_in_their_forms(plain: Any):
    tokenizer = with_template("LLAMA_3")
    ask, yes, no = user("Say"), assistant("yes"), assistant("no")
    human = "\n\nHuman: Say\n\nAssistant: "
    rows = [
        {"prompt": "Say", "chosen": "yes", "rejected": "no"},
        {"prompt": [ask], "chosen": [yes], "rejected": [no]},
        {"prompt": "Say", "chosen": [ask, yes], "rejected": [ask, no]},
        {"chosen": [ask, yes], "rejected": [ask, no]},
        {"chosen": human + "yes", "rejected": human + "no"},
        {"prompt": [ask], "chosen": yes, "rejected": no},
    ]
    wanted = [encode_chat(tokenizer, [ask, said]).ids for said in (yes, no)]
    for row in rows:
        chosen, rejected = encode_one(tokenizer, row, type="preference")
        assert [chosen.ids, rejected.ids] == wanted
        assert runs(tokenizer, chosen) == ["yes<|eot_id|>"]
        assert runs(tokenizer, rejected) == ["no<|eot_id|>"]
    # What both share is asked, not answered, whoever said it.
    before = [ask, assistant("what?"), ask]
    row = {"chosen": [*before, yes], "rejected": [*before, no]}
    assert runs(tokenizer, encode_one(tokenizer, row, type="preference")[0]) == ["yes<|eot_id|>"]
    row = {"prompt": "Q: why?\nA:", "chosen": " so", "rejected": " no"}
    chosen, rejected = encode_one(plain, row, type="preference")
    assert runs(plain, chosen) == [" so<|endoftext|>"]
    assert runs(plain, rejected) == [" no<|endoftext|>"]


# Prepared


def test_the_key_follows_all_that_the_ids_depend_on(tmp_path: Path):
    row = {"messages": CHAT, "conversations": CHAT, "prompt": "a", "completion": "b"}
    row |= {"text": "a", "input_ids": [5, 6], "chosen": "c", "rejected": "d"}
    file = write_rows(tmp_path / "a.jsonl", [row])

    def key(tokenizer: Any, **source: Any) -> str:
        return prepare_file(tokenizer, file, tmp_path / "c", **{"type": "chat", **source}).name

    llama, gemma = with_template("LLAMA_3"), with_template("GEMMA")
    types = ("chat", "text", "instruct", "preference", "tokens")
    keys = [key(llama, type=kind) for kind in types]
    keys += [key(llama, train_on=which) for which in ("last", "all")]
    keys += [key(llama, columns={"messages": "conversations"}), key(gemma)]
    keys += [key(with_template("GEMMA", **end)) for end in ({"bos": "</s>"}, {"eos": "<s>"})]
    assert len(set(keys)) == len(keys)
    # And nothing else: what decides on later steps only is not part of it.
    assert key(llama, weight=2.0, split="train") == keys[0]
    assert key(gemma, type="tokens") == keys[4]

"""Conversations, instructions, token ids and preferences as tokens, with the mask of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.config.sections.data import SourceConfig
from isles.data.chat.template import chat_prompt, stop_at_turns, use_template
from isles.data.sources.find import open_source
from isles.data.sources.rows import Row, Tally
from isles.data.tokens.encode import Encoded, Encoder, encode_each, encode_rows
from isles.data.tokens.prepare import prepare
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.errors import DataError
from isles.run.checkpoints import hash_file
from tests import chat_templates as templates
from tests.each import each

TEXT = [
    "The quick brown fox says hello there, fine thanks. assistant user system model think 0 1 2"
]
CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": " Hello, zwölf 😀!\n"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "fine"},
]


@pytest.fixture(scope="module")
def plain() -> Any:
    """A tokenizer without special tokens for chats, as a base model has it."""
    return train_tokenizer(TEXT * 5, 320)


def with_template(text: str, *, bos: str = "<s>", eos: str = "</s>") -> Any:
    """A tokenizer that knows the special tokens of all templates, and has this one."""
    tokenizer = train_tokenizer(TEXT * 5, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": list(templates.SPECIAL)})
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    tokenizer.chat_template = text
    return tokenizer


def encode_one(tokenizer: Any, row: dict[str, Any], **source: Any) -> list[Encoded]:
    """The documents of a row; a bad one raises."""
    encoder = Encoder(SourceConfig(path="any", **{"type": "chat", **source}), tokenizer)
    tally = Tally("any", 0.0)
    (documents,) = encode_each([Row("file:1", row)], encoder, tally)
    tally.judge()
    return documents


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
    (document,) = encode_one(tokenizer, {"messages": messages}, **source)
    return runs(tokenizer, document)


# What the assistant says, by template


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
        (
            "HARMONY",
            [
                "<|channel|>final<|message|> Hello, zwölf 😀!\n<|end|>",
                "<|channel|>final<|message|>fine<|return|>",
            ],
        ),
        ("MARKED", [" Hello, zwölf 😀!\n<|im_end|>", "<|im_end|>"]),
        ("PLAIN", ["  Hello, zwölf 😀!\n\n", " fine\n"]),
    ],
)
def test_only_what_the_assistant_says_is_trained(template: str, answers: list[str]):
    tokenizer = with_template(getattr(templates, template))
    (document,) = encode_one(tokenizer, {"messages": CHAT})
    reference = tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    if template == "PLAIN":  # its turns end with nothing at which generation could stop
        reference = [*reference, tokenizer.eos_token_id]
        assert document.trained[-1]
        document = Encoded(document.ids[:-1], document.trained[:-1])
        reference = reference[:-1]
    assert document.ids == reference  # what generation is prompted with later
    assert document.ids.count(tokenizer.bos_token_id) == (
        template in ("LLAMA_3", "MISTRAL", "GEMMA", "DEEPSEEK")
    )
    assert runs(tokenizer, document) == answers
    ending = tokenizer.eos_token if template == "PLAIN" else ""
    assert chat_runs(tokenizer, CHAT, train_on="last") == [answers[-1] + ending]
    (whole,) = encode_one(tokenizer, {"messages": CHAT}, train_on="all")
    assert whole.trained is None and whole.ids[: len(document.ids)] == document.ids


def test_what_is_generated_is_what_was_trained():
    """The ids before a trained answer are those that generation is prompted with."""
    for name in ("LLAMA_3", "MISTRAL", "GEMMA", "ZEPHYR", "QWEN_3", "PHI_3"):
        tokenizer = with_template(getattr(templates, name))
        (document,) = encode_one(tokenizer, {"messages": CHAT}, train_on="last")
        prompt = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True)["input_ids"]
        assert document.ids[: len(prompt)] == prompt, name
        assert np.flatnonzero(document.trained)[0] == len(prompt), name


def test_chatml_with_tokens_of_its_own_and_without(plain: Any, tmp_path: Path):
    trained = train_tokenizer(TEXT * 5, 320, is_chat=True)
    use_template(trained, "chatml")
    assert trained.eos_token == "<|im_end|>" and len(trained) <= 320
    assert chat_runs(trained, CHAT) == [" Hello, zwölf 😀!\n<|im_end|>", "fine<|im_end|>"]
    use_template(plain, "chatml")
    (document,) = encode_one(plain, {"messages": CHAT})
    answers = [" Hello, zwölf 😀!\n<|im_end|><|endoftext|>", "fine<|im_end|><|endoftext|>"]
    assert runs(plain, document) == answers
    assert document.ids.count(plain.eos_token_id) == 2  # one for each answer
    for tokenizer in (trained, plain):
        tokenizer.save_pretrained(tmp_path / "saved")
        loaded = load_tokenizer(str(tmp_path / "saved"))
        assert loaded.chat_template == tokenizer.chat_template
        assert (
            encode_one(loaded, {"messages": CHAT})[0].ids
            == encode_one(tokenizer, {"messages": CHAT})[0].ids
        )
    with pytest.raises(DataError, match="no form for tools"):
        encode_one(trained, {"messages": CHAT, "tools": [{"name": "f"}]})


def test_old_reasoning_is_dropped_and_the_last_is_trained():
    tokenizer = with_template(templates.QWEN_3)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nfirst"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>\nnew\n</think>\n\nsecond"},
    ]
    assert chat_runs(tokenizer, messages) == [
        "first<|im_end|>",
        "<think>\nnew\n</think>\n\nsecond<|im_end|>",
    ]


def test_tool_calls_are_what_the_assistant_says():
    tokenizer = with_template(templates.QWEN_3)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "sum"},
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
        encode_one(with_template(templates.LLAMA_3), {"messages": messages})


def test_an_answer_that_holds_what_stands_around_answers():
    tokenizer = with_template(templates.ZEPHYR)
    trap = "no</s>\n<|user|>\nok</s>\n<|assistant|>\nyes"
    messages = [CHAT[0], {"role": "assistant", "content": trap}, CHAT[2], CHAT[3]]
    assert chat_runs(tokenizer, messages) == [trap + "</s>", "fine</s>"]


def test_a_template_of_which_nobody_can_tell_what_is_said():
    tokenizer = with_template(templates.COUNTING_DOWN)
    with pytest.raises(DataError, match="renders message 1 otherwise") as caught:
        encode_one(tokenizer, {"messages": CHAT})
    assert "{% generation %}" in caught.value.fix and caught.value.where == "file:1"
    (document,) = encode_one(tokenizer, {"messages": CHAT}, train_on="all")
    assert document.trained is None


def test_a_slow_tokenizer_has_the_same_mask():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = templates.ZEPHYR
    assert not tokenizer.is_fast
    messages = [CHAT[0], {"role": "assistant", "content": "Hello, zwölf 😀!"}, *CHAT[2:]]
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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.chat_template = templates.MISTRAL
    (document,) = encode_one(tokenizer, {"messages": CHAT})
    assert document.ids == tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert tokenizer.unk_token_id not in document.ids
    (answer, _) = chat_runs(tokenizer, CHAT)
    assert answer.lstrip() == "Hello, zwölf 😀!</s>"
    tokens = tokenizer.convert_ids_to_tokens(document.ids)
    start = int(np.flatnonzero(document.trained)[0])
    assert tokens[start - 1] == "[/INST]" and tokens[start].startswith("▁")


def test_generation_stops_where_a_turn_ends():
    tokenizer = with_template(templates.LLAMA_3)
    stop_at_turns(tokenizer)
    assert tokenizer.eos_token == "<|eot_id|>"
    tokenizer = with_template(templates.HARMONY)
    stop_at_turns(tokenizer)
    assert tokenizer.eos_token == "<|return|>"
    for name in ("PHI_3", "MISTRAL", "PLAIN"):  # it writes eos_token itself, or has no other
        tokenizer = with_template(getattr(templates, name))
        stop_at_turns(tokenizer)
        assert tokenizer.eos_token == "</s>"


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


def test_a_message_is_asked_by_the_template(plain: Any):
    prompt = chat_prompt(with_template(templates.GEMMA), "Hi")
    assert prompt == "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    plain.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        chat_prompt(plain, "Hi")


def test_a_tokenizer_without_a_template_has_no_chat(plain: Any):
    plain.chat_template = None
    with pytest.raises(DataError, match="no chat template") as caught:
        encode_one(plain, {"messages": CHAT})
    assert "tokenizer.chat_template: chatml" in caught.value.fix


def test_an_exported_model_stops_where_a_turn_ends(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from isles.checkpoint.export import export_model

    tokenizer = with_template(templates.LLAMA_3)
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|eot_id|>"])
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, eos_token_id=ends[0]))
    stop_at_turns(tokenizer)
    export_model(model, tokenizer, tmp_path / "model", max_shard_bytes=10**9)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.generation_config.eos_token_id == ends
    assert load_tokenizer(str(tmp_path / "model")).chat_template == templates.LLAMA_3


# Forms of conversations


def test_the_same_rows_from_any_kind_of_file(tmp_path: Path):
    import csv
    import gzip

    import datasets

    tokenizer = with_template(templates.LLAMA_3)
    # Messages of unlike keys: columnar files fill what one lacks with null.
    rows = [{"messages": [*CHAT[:3], {**CHAT[3], "name": "x"}]}, {"messages": CHAT[:2]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=2))
    with (tmp_path / "d.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["messages"], *([json.dumps(r["messages"])] for r in rows)])
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "e.parquet")
    dataset.save_to_disk(tmp_path / "f")
    digests = set()
    for path in sorted(tmp_path.iterdir()):
        source = SourceConfig(path=str(path), type="chat")
        folder = prepare(
            open_source(source),
            Encoder(source, tokenizer),
            tmp_path / "cache",
            progress=lambda _: None,
        )
        digests.add(TokenStore.open(folder).digest)
    assert len(digests) == 1 and len(list((tmp_path / "cache").glob("tokens-*"))) == 6


def test_forms_of_conversations():
    tokenizer = with_template(templates.LLAMA_3)
    wanted = encode_one(tokenizer, {"messages": CHAT})[0].ids
    shared = [
        {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in CHAT
    ]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]
    lists = {key: [m[key] for m in CHAT] for key in ("role", "content")}
    own = [{"who": m["role"], "said": m["content"]} for m in CHAT]
    for row in (
        {"conversations": shared},
        {"conversations": shared, "messages": None} | {"messages": shared},
        {"messages": parts},
        {"messages": json.dumps(CHAT)},
        {"messages": lists},
    ):
        assert encode_one(tokenizer, row)[0].ids == wanted
    columns = {"messages": "talk", "role": "who", "content": "said"}
    assert encode_one(tokenizer, {"talk": own}, columns=columns)[0].ids == wanted
    system = [{"role": "system", "content": "Be brief"}, *CHAT]
    assert (
        encode_one(tokenizer, {"conversations": shared, "system": "Be brief"})[0].ids
        == encode_one(tokenizer, {"messages": system})[0].ids
    )


# Instructions


def test_instructions_with_and_without_a_template(plain: Any):
    tokenizer = with_template(templates.LLAMA_3)
    rows = [
        {"instruction": "Say", "input": "it", "output": "yes"},
        {"prompt": "Say\n\nit", "completion": "yes"},
        {"prompt": [{"role": "user", "content": "Say\n\nit"}], "completion": "yes"},
    ]
    wanted = encode_one(
        tokenizer,
        {
            "messages": [
                {"role": "user", "content": "Say\n\nit"},
                {"role": "assistant", "content": "yes"},
            ]
        },
    )[0]
    for row in rows:
        (document,) = encode_one(tokenizer, row, type="instruct")
        assert document.ids == wanted.ids and runs(tokenizer, document) == ["yes<|eot_id|>"]
    named = {"instruction": "q", "output": "a"}
    (document,) = encode_one(
        tokenizer, {"q": "Say\n\nit", "a": "yes"}, type="instruct", columns=named
    )
    assert document.ids == wanted.ids
    plain.chat_template = None
    (document,) = encode_one(plain, rows[0], type="instruct")
    assert plain.decode(document.ids) == (
        "### Instruction:\nSay\n\n### Input:\nit\n\n### Response:\nyes<|endoftext|>"
    )
    assert runs(plain, document) == ["yes<|endoftext|>"]
    (document,) = encode_one(plain, rows[1] | {"system": "S"}, type="instruct")
    assert plain.decode(document.ids) == "S\n\nSay\n\nityes<|endoftext|>"
    (document,) = encode_one(plain, rows[1], type="instruct", train_on="all")
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
    (document,) = encode_one(tokenizer, {"messages": CHAT})
    assert document.ids.count(tokenizer.bos_token_id) == 1


# Tokens


def test_token_ids_as_they_are(plain: Any):
    rows = [
        ({"input_ids": [5, 6, 7]}, [5, 6, 7], [1, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, [5, 6, 7], [0, 0, 1]),
        ({"input_ids": [9, 5, 6, 9], "attention_mask": [0, 1, 1, 0]}, [5, 6], [1, 1]),
        ({"input_ids": "[5, 6]"}, [5, 6], [1, 1]),
    ]
    for row, ids, trained in rows:
        (document,) = encode_one(plain, row, type="tokens")
        assert document.ids == ids and document.trained.tolist() == [bool(t) for t in trained]


# Preferences


def test_preferences_in_their_forms():
    tokenizer = with_template(templates.LLAMA_3)
    ask = {"role": "user", "content": "Say"}
    yes, no = ({"role": "assistant", "content": said} for said in ("yes", "no"))
    human = "\n\nHuman: Say\n\nAssistant: "
    rows = [
        {"prompt": "Say", "chosen": "yes", "rejected": "no"},
        {"prompt": [ask], "chosen": [yes], "rejected": [no]},
        {"prompt": "Say", "chosen": [ask, yes], "rejected": [ask, no]},
        {"chosen": [ask, yes], "rejected": [ask, no]},
        {"chosen": human + "yes", "rejected": human + "no"},
        {"prompt": [ask], "chosen": yes, "rejected": no},
    ]
    wanted = [encode_one(tokenizer, {"messages": [ask, said]})[0].ids for said in (yes, no)]
    for row in rows:
        chosen, rejected = encode_one(tokenizer, row, type="preference")
        assert [chosen.ids, rejected.ids] == wanted
        assert runs(tokenizer, chosen) == ["yes<|eot_id|>"]
        assert runs(tokenizer, rejected) == ["no<|eot_id|>"]
    # What both share is asked, not answered, whoever said it.
    before = [ask, {"role": "assistant", "content": "what?"}, ask]
    row = {"chosen": [*before, yes], "rejected": [*before, no]}
    assert runs(tokenizer, encode_one(tokenizer, row, type="preference")[0]) == ["yes<|eot_id|>"]


def test_preferences_without_a_template(plain: Any):
    plain.chat_template = None
    row = {"prompt": "Q: why?\nA:", "chosen": " so", "rejected": " no"}
    chosen, rejected = encode_one(plain, row, type="preference")
    assert runs(plain, chosen) == [" so<|endoftext|>"]
    assert runs(plain, rejected) == [" no<|endoftext|>"]


# Stores


def test_a_store_keeps_the_mask(tmp_path: Path):
    tokenizer = with_template(templates.LLAMA_3)
    rows = [{"messages": CHAT[:2]}, {"messages": CHAT}] * 700  # more than a batch
    file = tmp_path / "a.json"
    file.write_text(json.dumps(rows))
    source = SourceConfig(path=str(file), type="chat")
    encoder = Encoder(source, tokenizer)
    folder = prepare(open_source(source), encoder, tmp_path / "c", progress=lambda _: None)
    store = TokenStore.open(folder)
    files = store.manifest["files"]
    assert all(hash_file(folder / name) == facts["sha256"] for name, facts in files.items())
    documents = [
        document
        for batch in encode_rows(open_source(source).rows(encoder.parser), encoder, Tally("", 0))
        for document in batch
    ]
    assert store.kind == "chat" and store.trained is not None and store.trained.dtype == np.bool_
    assert store.tokens.tolist() == [token for document in documents for token in document.ids]
    assert np.array_equal(store.trained, np.concatenate([d.trained for d in documents]))
    assert store.document_ends.tolist() == np.cumsum([len(d.ids) for d in documents]).tolist()
    (folder / "trained.bin").unlink()
    with pytest.raises(DataError, match=r"trained\.bin is missing"):
        TokenStore.open(folder)


def test_the_key_follows_all_that_the_ids_depend_on(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    row = {"messages": CHAT, "conversations": CHAT, "prompt": "a", "completion": "b"}
    file.write_text(json.dumps(row | {"input_ids": [5, 6], "chosen": "c", "rejected": "d"}) + "\n")

    def key(tokenizer: Any, **keys: Any) -> str:
        source = SourceConfig(path=str(file), **{"type": "chat", **keys})
        opened, encoder = open_source(source), Encoder(source, tokenizer)
        folder = prepare(opened, encoder, tmp_path / "c", progress=lambda _: None)
        return folder.name

    llama = with_template(templates.LLAMA_3)
    keys = [
        key(llama),
        key(llama, train_on="last"),
        key(llama, train_on="all"),
        key(llama, columns={"messages": "conversations"}),
        key(llama, type="instruct"),
        key(llama, type="tokens"),
        key(llama, type="preference"),
        key(with_template(templates.GEMMA)),
        key(with_template(templates.GEMMA, bos="</s>")),
        key(with_template(templates.GEMMA, eos="<s>")),
    ]
    assert len(set(keys)) == len(keys)
    # And nothing else: what decides on later steps only is not part of it.
    assert key(llama, weight=2.0, split="train") == keys[0]
    assert key(with_template(templates.LLAMA_3), type="tokens") == keys[5]
    assert key(with_template(templates.GEMMA, eos="</s>"), type="tokens") == keys[5]


def test_bad_rows_below_the_limit_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tokenizer = with_template(templates.LLAMA_3)
    file = tmp_path / "a.jsonl"
    rows: list[Any] = [{"messages": CHAT}] * 20
    rows[3], rows[7] = {"messages": []}, {"message": CHAT}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(file), type="chat")

    def make(limit: float) -> TokenStore:
        folder = prepare(
            open_source(source),
            Encoder(source, tokenizer),
            tmp_path / "c",
            progress=lambda _: None,
            max_bad_fraction=limit,
        )
        return TokenStore.open(folder)

    with pytest.raises(DataError) as caught:
        make(0.05)
    assert "2 of 20 rows" in caught.value.what and "it takes 0.1 here" in caught.value.fix
    assert f"{file}:4: " in caught.value.what and f"{file}:8: " in caught.value.what
    store = make(0.1)
    assert len(store.document_ends) == 18 and "bad_rows=2" in caplog.text
    assert f"{file}:8" in caplog.text
    manifest = store.manifest
    assert (manifest["rows"], manifest["bad"], manifest["empty"]) == (20, 2, 0)
    assert manifest["first_bad"][0][0] == f"{file}:4"
    with pytest.raises(DataError, match="2 of 20 rows"):  # also of what was prepared before
        make(0.0)

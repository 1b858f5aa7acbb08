"""Conversations, instructions, ids, preferences as tokens; what is trained is what is shown."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
import sys
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from isles.checkpoint.export import export_model
from isles.cli import main
from isles.config.sections.data import SourceConfig
from isles.data.chat.template import chat_prompt, stop_at_turns, use_template
from isles.data.show import SHOWN_TOKENS, shown_documents
from isles.data.sources.rows import Row, Tally
from isles.data.tokens.encode import Encoded, Encoder, encode_each
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.errors import DataError
from isles.facts.units import printable
from tests import chat_templates as templates
from tests.data import prepare_file, write_rows
from tests.deadline import run_program
from tests.each import each
from tests.small_models import small_model

TEXT = ["The quick brown fox says hello there, fine thanks. assistant user system model think 0"]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


CHAT = [user("Hi there"), assistant(" Hello, zwölf 😀!\n"), user("ok"), assistant("fine")]


@pytest.fixture
def plain():
    """A tokenizer without special tokens for chats and without a template, as of a base model."""
    return train_tokenizer(TEXT * 5, 320)


@pytest.fixture
def chatml():
    """A tokenizer with the tokens of ChatML."""
    made = train_tokenizer(TEXT * 5, 320, is_chat=True)
    use_template(made, "chatml")
    return made


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
    places = zip(document.ids, document.trained, strict=True)
    stretches = groupby(places, key=lambda place: bool(place[1]))
    return [
        tokenizer.decode([token for token, _ in part]) for trained, part in stretches if trained
    ]


def chat_runs(tokenizer: Any, messages: Any, **source: Any) -> list[str]:
    return runs(tokenizer, encode_chat(tokenizer, messages, **source))


FINAL = "<|channel|>final<|message|>"


@each(
    ("LLAMA_3", ["Hello, zwölf 😀!<|eot_id|>", "fine<|eot_id|>"]),
    ("MISTRAL", [" Hello, zwölf 😀!</s>", " fine</s>"]),
    ("GEMMA", ["Hello, zwölf 😀!<end_of_turn>", "fine<end_of_turn>"]),
    ("ZEPHYR", [" Hello, zwölf 😀!\n</s>", "fine</s>"]),
    ("QWEN_3", [" Hello, zwölf 😀!\n<|im_end|>", "<think>\n\n</think>\n\nfine<|im_end|>"]),
    ("PHI_3", [" Hello, zwölf 😀!\n<|end|>", "fine<|end|>"]),
    ("DEEPSEEK", [" Hello, zwölf 😀!\n</s>", "fine</s>"]),
    ("HARMONY", [f"{FINAL} Hello, zwölf 😀!\n<|end|>", f"{FINAL}fine<|return|>"]),
    ("MARKED", [" Hello, zwölf 😀!\n<|im_end|>", "<|im_end|>"]),
    # Its turns end with nothing at which generation could stop.
    ("PLAIN", ["  Hello, zwölf 😀!\n\n", " fine\n</s>"]),
)
def test_only_what_the_assistant_says_is_trained(template, answers):
    tokenizer = with_template(template)
    document = encode_chat(tokenizer, CHAT)
    reference = tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    reference += [tokenizer.eos_token_id] * (template == "PLAIN")
    assert document.ids == reference  # what generation is prompted with later
    assert runs(tokenizer, document) == answers
    whole = encode_chat(tokenizer, CHAT, train_on="all")
    assert whole.trained is None and whole.ids == document.ids
    last = encode_chat(tokenizer, CHAT, train_on="last")
    assert runs(tokenizer, last) == answers[-1:]
    if template in ("LLAMA_3", "MISTRAL", "GEMMA", "ZEPHYR", "QWEN_3", "PHI_3"):
        prompt = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True)["input_ids"]
        assert last.ids[: len(prompt)] == prompt
        assert np.flatnonzero(last.trained)[0] == len(prompt)


def test_chatml_with_tokens_of_its_own_and_without(plain, chatml, tmp_path):
    use_template(plain, "chatml")
    for tokenizer, end in ((chatml, "<|im_end|>"), (plain, "<|im_end|><|endoftext|>")):
        document = encode_chat(tokenizer, CHAT)
        assert runs(tokenizer, document) == [f" Hello, zwölf 😀!\n{end}", f"fine{end}"]
        assert end.endswith(tokenizer.eos_token) and len(tokenizer) <= 320
        tokenizer.save_pretrained(tmp_path / "saved")
        loaded = load_tokenizer(str(tmp_path / "saved"))
        assert loaded.chat_template == tokenizer.chat_template
        assert encode_chat(loaded, CHAT).ids == document.ids
    assert document.ids.count(plain.eos_token_id) == 2  # one for each answer
    with pytest.raises(DataError, match="no form for tools"):
        encode_one(chatml, {"messages": CHAT, "tools": [{"name": "f"}]})


def test_tool_calls_and_the_last_reasoning_are_what_the_assistant_says():
    tokenizer = with_template("QWEN_3")
    old, new = ("<think>\nold\n</think>\n\nfirst", "<think>\nnew\n</think>\n\nsecond")
    messages = [user("one"), assistant(old), user("two"), assistant(new)]
    assert chat_runs(tokenizer, messages) == ["first<|im_end|>", f"{new}<|im_end|>"]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calls, result = {"role": "assistant", "content": None}, {"role": "tool", "content": "2"}
    last = {**assistant("two"), "tool_calls": None}
    messages = [user("sum"), {**calls, "tool_calls": [call]}, result, last]
    tools = json.dumps([{"type": "function", "function": {"name": "add"}}])
    (document,) = encode_one(tokenizer, {"messages": messages, "tools": tools})
    said, last = runs(tokenizer, document)
    assert said.endswith("</tool_call><|im_end|>") and '"arguments": {"a": 1}' in said
    assert last.endswith("two<|im_end|>")
    assert "# Tools" in tokenizer.decode(document.ids[:40])
    # A template that knows nothing of them would train on an empty turn.
    with pytest.raises(DataError, match="does not write the call of add in message 1"):
        encode_chat(with_template("LLAMA_3"), messages)


def test_answers_are_told_from_what_stands_around_them_or_it_is_an_error():
    trap = "no</s>\n<|user|>\nok</s>\n<|assistant|>\nyes"
    messages = [CHAT[0], assistant(trap), *CHAT[2:]]
    assert chat_runs(with_template("ZEPHYR"), messages) == [f"{trap}</s>", "fine</s>"]
    tokenizer = with_template("COUNTING_DOWN")
    with pytest.raises(DataError, match="renders message 1 otherwise") as caught:
        encode_chat(tokenizer, CHAT)
    assert "{% generation %}" in caught.value.fix and caught.value.where == "file:1"
    assert encode_chat(tokenizer, CHAT, train_on="all").trained is None


def test_tokenizers_that_are_slow_or_have_spaces_in_their_tokens_have_the_same_mask():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = templates.ZEPHYR
    assert not tokenizer.is_fast
    messages = [CHAT[0], assistant("Hello, zwölf 😀!"), *CHAT[2:]]
    assert chat_runs(tokenizer, messages) == ["Hello, zwölf 😀!</s>", "fine</s>"]
    # Bytes and words of sentencepiece, as Llama 2, Mistral and Gemma have them.
    pieces = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    pieces.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", *templates.SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    pieces.train_from_iterator(TEXT, trainer)
    state = json.loads(pieces.to_str())
    size = len(state["model"]["vocab"])
    state["model"]["vocab"] |= {f"<0x{n:02X}>": size + n for n in range(256)}
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    core = Tokenizer.from_str(json.dumps(state))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = templates.MISTRAL
    document = encode_chat(tokenizer, CHAT)
    assert document.ids == tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert tokenizer.unk_token_id not in document.ids
    assert runs(tokenizer, document)[0].lstrip() == "Hello, zwölf 😀!</s>"
    tokens = tokenizer.convert_ids_to_tokens(document.ids)
    start = int(np.flatnonzero(document.trained)[0])
    assert tokens[start - 1] == "[/INST]" and tokens[start].startswith("▁")


def test_generation_stops_where_a_turn_ends_also_by_an_exported_model(tmp_path):
    for template, stop in (
        ("HARMONY", "<|return|>"),
        ("PHI_3", "</s>"),  # it writes eos_token itself
        ("MISTRAL", "</s>"),
        ("PLAIN", "</s>"),  # it has no other
        ("LLAMA_3", "<|eot_id|>"),
    ):
        tokenizer = with_template(template)
        stop_at_turns(tokenizer)
        assert tokenizer.eos_token == stop, template
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|eot_id|>"])
    model = small_model(vocab_size=len(tokenizer), eos_token_id=ends[0])
    export_model(model, tokenizer, tmp_path, max_shard_bytes=10**9, verify=lambda *_: None)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == ends


@each(
    (None, "chat template not found", "tokenizer.chat_template"),
    (b" \n", "is empty", "t.jinja"),
    (b"a\n{% for %}", "is not valid Jinja", "t.jinja:2"),
    (b"a\n\xff", "not UTF-8", "t.jinja:2"),
)
def test_a_broken_template_is_named(content, what, where, *, plain, tmp_path):
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        use_template(plain, str(file))
    assert caught.value.where.endswith(where) and caught.value.fix


def test_messages_need_a_template(plain):
    prompt = chat_prompt(with_template("GEMMA"), "Hi")
    assert prompt == "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    for needs_one in (lambda: chat_prompt(plain, "Hi"), lambda: encode_chat(plain, CHAT)):
        with pytest.raises(DataError, match="no chat template") as caught:
            needs_one()
    assert "tokenizer.chat_template: chatml" in caught.value.fix


def test_the_same_rows_from_any_kind_of_file(tmp_path):
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
        prepare_file(tokenizer, path, tmp_path / "cache", type="chat").digest
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


def test_instructions_with_a_template_and_without(plain):
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


def test_token_ids_as_they_are(plain):
    for row, ids, trained in (
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, [5, 6, 7], [False, False, True]),
        ({"input_ids": [9, 5, 6, 9], "attention_mask": [0, 1, 1, 0]}, [5, 6], [True, True]),
        ({"input_ids": "[5, 6]"}, [5, 6], [True, True]),
    ):
        (document,) = encode_one(plain, row, type="tokens")
        assert document.ids == ids and document.trained.tolist() == trained


def test_preferences_in_their_forms(plain):
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


def test_the_key_follows_all_that_the_ids_depend_on(tmp_path):
    row = {"messages": CHAT, "conversations": CHAT, "prompt": "a", "completion": "b"}
    row |= {"text": "a", "input_ids": [5, 6], "chosen": "c", "rejected": "d"}
    file = write_rows(tmp_path / "a.jsonl", [row])

    def key(tokenizer: Any, **source: Any) -> str:
        source = {"type": "chat", **source}
        return prepare_file(tokenizer, file, tmp_path / "c", **source).folder.name

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


def test_samples_and_counts_are_printed(tmp_path, run_file, monkeypatch, capfd):
    chats = [[user(f"Number {n}?"), assistant("It is " + "so " * n)] for n in range(30)]
    write_rows(tmp_path / "chat.jsonl", [{"messages": chat, "id": 1} for chat in chats])
    rows = [{"instruction": "Say it", "output": f"[red]{n}[/red]"} for n in range(7)]
    write_rows(tmp_path / "alpaca.jsonl", rows)
    chat, tasks = "{path: chat.jsonl, type: chat}", "{path: alpaca.jsonl, type: instruct"
    data = [f"data.sources=[{chat}, {tasks}, train_on: all}}]", f"data.cache_dir={tmp_path}/made"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(["data", "show", str(run_file), *data, "--samples=2", "data.seq_length=24"]) == 0
    out, _ = capfd.readouterr()
    assert "1. chat.jsonl: type chat · template chatml · train_on assistant\n" in out
    assert "Number 0?<|im_end|>\n<|im_start|>assistant\n⟦It is <|im_end|>⟧\n" in out
    assert out.count("── chat ") == 2 and "chat 30 of 30" in out
    assert "longer than seq_length 24" in out
    assert "nothing reads these fields (share of rows): id 100 %\n" in out
    assert "type instruct · template chatml · train_on all · every token is trained" in out
    assert "[red]6[/red]<|im_end|>" in out
    table = {line[:26].strip(): line[26:].split() for line in out.splitlines()}
    assert table["rows"] == table["documents"] == ["30", "7"]
    assert table["truncated"][0] == table["longer than seq_length"][0] != "0"
    assert table["trained tokens"][-1] == "(100.0%)"
    # A training that follows finds it ready.
    assert len(list((tmp_path / "made").glob("tokens-*"))) == 2
    assert not list(tmp_path.glob("runs*"))


def test_documents_are_shown_whole_and_marked_exactly_and_pairs_together(chatml, tmp_path):
    messages = [user("hello 😀"), assistant(" zwölf"), user("x"), assistant("y" * 2000)]
    file = write_rows(tmp_path / "chat.jsonl", [{"messages": messages}])
    store = prepare_file(chatml, file, tmp_path / "c", type="chat")
    (shown,) = shown_documents(store, chatml.decode, 100, 5)
    texts = [stretch.text for stretch in shown.stretches if stretch.is_trained]
    assert texts[0] == " zwölf<|im_end|>" and set(texts[1]) == {"y"}
    assert shown.num_hidden == len(store.tokens) - SHOWN_TOKENS > 0
    whole = chatml.decode(store.tokens[:SHOWN_TOKENS].tolist())
    assert "".join(stretch.text for stretch in shown.stretches) == whole
    assert printable("a\x1b[31m\r\x00\tb\nä") == "a\\u001b[31m\\u000d\\u0000\tb\nä"
    rows = [{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(9)]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    store = prepare_file(chatml, file, tmp_path / "c", type="preference")
    shown = list(shown_documents(store, chatml.decode, 100, 2))
    titles = [one.title.split(":")[0].removeprefix("preference ") for one in shown]
    assert titles == [f"{n} of 9, {which}" for n in (1, 9) for which in ("chosen", "rejected")]
    said = [one.stretches[1].text for one in shown]
    assert said == ["yes<|im_end|>", "no<|im_end|>"] * 2


def test_who_has_seen_enough_of_the_data_sees_no_traceback(tmp_path, run_file):
    chats = [[user("Count"), assistant("so " * 9_000)]] * 40
    write_rows(tmp_path / "chat.jsonl", [{"messages": chat} for chat in chats])
    words = [sys.executable, "-m", "isles", "data", "show", str(run_file), "--samples=40"]
    words += ["data.sources=[{path: chat.jsonl, type: chat}]", f"data.cache_dir={tmp_path}/made"]
    done = run_program(["bash", "-c", f"{shlex.join(words)} | head -1"], cwd=tmp_path)
    assert "1. chat.jsonl" in done.stdout and "Traceback" not in done.stderr

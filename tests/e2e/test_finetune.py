"""A tiny chat model: from scratch to answers, with all weights, with LoRA, and with preferences.

The model is small enough to learn a few answers by heart, so what it says proves the whole way:
template, mask, packing, training, export, and `generate` of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.data import chat_rows, write_rows
from tests.e2e.typed import Command, isles
from tests.inputs import TINY
from tests.runs import losses_of, rows_of

ANSWERS = {
    "What is the capital of France?": "It is Paris.",
    "What is the capital of Peru?": "It is Lima.",
    "Who wrote Faust?": "Goethe wrote it.",
    "What is two plus two?": "Four.",
    "Name a river.": "The Nile.",
    "Name a planet.": "Venus.",
}
OTHERS = dict(zip(ANSWERS, [*list(ANSWERS.values())[1:], "It is Paris."], strict=True))
RUN = """\
model: {name_or_path: runs/base-1/model}
data: {seq_length: 64, validation_fraction: 0}
training:
  {max_steps: 60, global_batch_size: 4, micro_batch_size: 4, learning_rate: 0.005, warmup_steps: 5,
   weight_decay: 0, precision: 32-true, logging_steps: 5}
checkpoint: {every_steps: null, every_minutes: null}
track: [jsonl]
"""


def ask(model: Any, tokenizer: Any, question: str) -> str:
    """What the model answers, as a user of transformers asks it."""
    asked = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    said = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True))


def load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def answers_of(folder: Path) -> dict[str, str]:
    model, tokenizer = load(folder)
    return {question: ask(model, tokenizer, question) for question in ANSWERS}


def train(folder: Path, name: str, data: str, *words: str, type: str = "chat") -> Command:
    """Train on a file of the workshop, under this name."""
    sources = f"data.sources=[{{path: {data}.jsonl, type: {type}}}]"
    return isles("train", "run.yaml", f"name={name}", sources, *words, cwd=folder)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, trained from scratch on wrong answers, and data to tune it."""
    folder = tmp_path_factory.mktemp("workshop")
    shape = {**TINY, "hidden_size": 48, "intermediate_size": 96, "vocab_size": 400}
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(shape))
    (folder / "run.yaml").write_text(RUN)
    pairs = [{"prompt": q, "chosen": ANSWERS[q], "rejected": OTHERS[q]} for q in ANSWERS]
    write_rows(folder / "wrong.jsonl", chat_rows(OTHERS) * 4)
    write_rows(folder / "chat.jsonl", chat_rows(ANSWERS) * 4)
    write_rows(folder / "preferences.jsonl", pairs * 4)
    words = ("model.name_or_path=shape", "model.init=scratch", "tokenizer.train_vocab_size=400")
    train(folder, "base", "wrong", *words, "tokenizer.chat_template=chatml")
    return folder


def run_of(folder: Path, name: str) -> RunDir:
    return RunDir(folder / "runs" / f"{name}-1")


def assert_evaluates_as_it_trained(folder: Path, name: str) -> None:
    """`isles eval`, in a process of its own, says what the run recorded at its end."""
    recorded = rows_of(run_of(folder, name), "eval")[-1]["loss"]
    assert f"validation loss {recorded:.4f}" in isles("eval", f"{name}-1", cwd=folder).out


@pytest.mark.long
def test_full_fine_tuning_of_a_chat_model(workshop: Path) -> None:
    """It starts from what its base has learned, the wrong answers, and not from chance."""
    base, tuned = run_of(workshop, "base"), run_of(workshop, "full")
    assert answers_of(base.model) == OTHERS
    train(workshop, "full", "chat", "data.validation_fraction=0.2")
    losses = losses_of(tuned)
    assert losses[-1] < 0.2 < losses[0] < losses_of(base)[0] - 1
    assert_evaluates_as_it_trained(workshop, "full")
    assert answers_of(tuned.model) == ANSWERS


def test_lora_alone_and_merged(workshop: Path) -> None:
    from peft import PeftModel

    options = ("adapter.type=lora", "adapter.r=32", "training.learning_rate=0.02")
    train(workshop, "lora", "chat", *options, "training.max_steps=80")
    losses = losses_of(run_of(workshop, "lora"))
    assert losses[-1] < 0.4 < losses[0], losses
    adapter = run_of(workshop, "lora").model
    assert not (adapter / "model.safetensors").exists(), "the adapter alone"
    base, tokenizer = load(run_of(workshop, "base").model)
    tuned = PeftModel.from_pretrained(base, adapter).eval()
    assert {question: ask(tuned, tokenizer, question) for question in ANSWERS} == ANSWERS
    isles("checkpoint", "export", "lora-1", "--merge-adapter", "--output", "merged", cwd=workshop)
    assert answers_of(workshop / "merged") == ANSWERS


@pytest.mark.long
def test_preferences_turn_the_answers_round(workshop: Path) -> None:
    """With an adapter; that of all weights is in tests/dist/test_dpo.py."""
    options = ("adapter.type=lora", "training.method=dpo", "training.dpo_beta=0.5")
    options += ("training.max_steps=40", "data.validation_fraction=0.2")
    shown = train(workshop, "dpo", "preferences", *options, type="preference")
    rows = rows_of(run_of(workshop, "dpo"))
    first, last = rows[0]["loss"], rows[-1]["loss"]
    assert first == pytest.approx(0.6931, abs=1e-3), "log 2: nothing is preferred yet"
    assert last < 0.1
    assert_evaluates_as_it_trained(workshop, "dpo")
    assert rows[-1]["reward_accuracy"] == 1
    assert rows[-1]["reward_chosen"] > rows[-1]["reward_rejected"]
    assert "chosen preferred 100%" in shown.out
    summary = read_record(run_of(workshop, "dpo").summary) or {}
    assert summary["last_loss"] == pytest.approx(last)

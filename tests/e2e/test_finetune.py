"""A tiny chat model: from scratch to answers, with all weights, with LoRA, and with preferences.

The model is small enough to learn a few answers by heart, so what it says proves the whole way:
template, mask, packing, training, export, and `generate` of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from isles.run.records import read_record, read_rows
from tests.e2e.test_train import isles

ANSWERS = {
    "What is the capital of France?": "It is Paris.",
    "What is the capital of Peru?": "It is Lima.",
    "Who wrote Faust?": "Goethe wrote it.",
    "What is two plus two?": "Four.",
    "Name a river.": "The Nile.",
    "Name a planet.": "Venus.",
}
OTHERS = dict(zip(ANSWERS, [*list(ANSWERS.values())[1:], "It is Paris."], strict=True))


def ask(model: Any, tokenizer: Any, question: str) -> str:
    """What the model answers, as a user of transformers asks it."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(
        tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_rows(answers: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in answers.items()
    ]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, trained from scratch on wrong answers, and data to tune it."""
    folder = tmp_path_factory.mktemp("workshop")
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 400,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(shape))
    write_jsonl(folder / "wrong.jsonl", chat_rows(OTHERS) * 4)
    write_jsonl(folder / "chat.jsonl", chat_rows(ANSWERS) * 4)
    write_jsonl(
        folder / "preferences.jsonl",
        [
            {"prompt": question, "chosen": ANSWERS[question], "rejected": OTHERS[question]}
            for question in ANSWERS
        ]
        * 4,
    )
    base = run_file(folder, "base", path="wrong.jsonl", type="chat")
    isles(
        "train",
        str(base),
        "model.name_or_path=shape",
        "model.init=scratch",
        "tokenizer.train_vocab_size=400",
        "tokenizer.chat_template=chatml",
        cwd=folder,
    )
    return folder


def run_file(folder: Path, name: str, *, path: str, type: str, **training: Any) -> Path:
    content = {
        "name": name,
        "model": {"name_or_path": "runs/base-1/model"},
        "data": {
            "sources": [{"path": path, "type": type}],
            "seq_length": 64,
            "validation_fraction": 0,
        },
        "training": {
            "max_steps": 60,
            "global_batch_size": 4,
            "micro_batch_size": 4,
            "learning_rate": 0.005,
            "warmup_steps": 5,
            "weight_decay": 0.0,
            "precision": "32-true",
            "logging_steps": 5,
            **training,
        },
        "checkpoint": {"every_steps": None, "every_minutes": None},
        "track": ["jsonl"],
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def losses(folder: Path, name: str) -> tuple[float, float]:
    rows = read_rows(folder / "runs" / f"{name}-1" / "metrics.jsonl")
    trained = [row["loss"] for row in rows if row["kind"] == "train"]
    return trained[0], trained[-1]


def assert_evaluates_as_it_trained(folder: Path, name: str) -> None:
    """`isles eval`, in a process of its own, says what the run recorded at its end."""
    rows = read_rows(folder / "runs" / f"{name}-1" / "metrics.jsonl")
    recorded = [row["loss"] for row in rows if row["kind"] == "eval"][-1]
    assert f"validation loss {recorded:.4f}" in isles("eval", f"{name}-1", cwd=folder).out


def assert_answers(folder: Path, answers: dict[str, str]) -> None:
    model, tokenizer = load(folder)
    said = {question: ask(model, tokenizer, question) for question in answers}
    assert said == answers


@pytest.mark.long
def test_the_base_learnt_the_wrong_answers(workshop: Path) -> None:
    assert_answers(workshop / "runs" / "base-1" / "model", OTHERS)


@pytest.mark.long
def test_full_fine_tuning_of_a_chat_model(workshop: Path) -> None:
    file = run_file(workshop, "full", path="chat.jsonl", type="chat")
    isles("train", str(file), "data.validation_fraction=0.2", cwd=workshop)
    first, last = losses(workshop, "full")
    assert_evaluates_as_it_trained(workshop, "full")
    assert last < 0.2 < first
    assert_answers(workshop / "runs" / "full-1" / "model", ANSWERS)


def test_lora_alone_and_merged(workshop: Path) -> None:
    from peft import PeftModel

    file = run_file(workshop, "lora", path="chat.jsonl", type="chat")
    options = ("adapter.type=lora", "adapter.r=32", "training.learning_rate=0.02")
    options += ("training.max_steps=80",)
    isles("train", str(file), *options, cwd=workshop)
    first, last = losses(workshop, "lora")
    assert last < 0.4 < first, (first, last)
    adapter = workshop / "runs" / "lora-1" / "model"
    assert not (adapter / "model.safetensors").exists(), "the adapter alone"
    base, tokenizer = load(workshop / "runs" / "base-1" / "model")
    tuned = PeftModel.from_pretrained(base, adapter).eval()
    said = {question: ask(tuned, tokenizer, question) for question in ANSWERS}
    assert said == ANSWERS
    isles("checkpoint", "export", "lora-1", "--merge-adapter", "--output", "merged", cwd=workshop)
    assert_answers(workshop / "merged", ANSWERS)


@pytest.mark.long
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_preferences_turn_the_answers_round(workshop: Path, adapter: str) -> None:
    name = f"dpo-{adapter}"
    file = run_file(
        workshop, name, path="preferences.jsonl", type="preference", method="dpo", dpo_beta=0.5
    )
    options = ["adapter.type=lora"] if adapter == "lora" else []
    options += ["training.max_steps=40", "data.validation_fraction=0.2"]
    shown = isles("train", str(file), *options, cwd=workshop)
    first, last = losses(workshop, name)
    assert first == pytest.approx(0.6931, abs=1e-3), "log 2: nothing is preferred yet"
    assert last < 0.1
    assert_evaluates_as_it_trained(workshop, name)
    rows = read_rows(workshop / "runs" / f"{name}-1" / "metrics.jsonl")
    rows = [row for row in rows if row["kind"] == "train"]
    assert rows[-1]["reward_accuracy"] == 1
    assert rows[-1]["reward_chosen"] > rows[-1]["reward_rejected"]
    assert "chosen preferred 100%" in shown.out
    summary = read_record(workshop / "runs" / f"{name}-1" / "summary.json") or {}
    assert summary["last_loss"] == pytest.approx(last)

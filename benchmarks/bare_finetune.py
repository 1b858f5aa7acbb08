"""Hugging Face's Trainer and TRL's SFTTrainer on conversations, as one sets them up by hand.

`benchmarks/finetune.py` compares isles with them. This knows nothing of isles. fp32, on the CPU.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer
from trl.data_utils import pack_dataset

IGNORED = -100
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained with; `rows` is the micro-batch, which is the whole batch."""

    model: Path
    conversations: Path
    output: Path
    seq_length: int
    rows: int
    max_steps: int
    learning_rate: float
    lora: bool


class Finetuning:
    """A Trainer that runs so many steps at a time, in a thread of its own that waits in between.

    Args:
        kind: `packed`: Trainer on samples that trl.pack_dataset has packed, a row each, with the
            positions by which transformers keeps their conversations apart. `grouped`: Trainer on
            conversations of about the same length, padded to the longest; as many as have about
            the tokens of the packed rows. `trl`: SFTTrainer with packing, which lays the rows of a
            micro-batch end to end; so it gets one row at a time, and accumulates their gradients.
        settings: see there.
    """

    def __init__(self, kind: str, settings: Settings) -> None:
        self._gate = _Gate()
        self._tokens, self._of_runs = 0, list[int]()
        data = encode(settings)
        model = make_model(settings)
        if kind == "trl":
            self._trainer: Trainer = self._trl(data, model, settings)
        else:
            self._trainer = self._plain(data, model, settings, is_packed=kind == "packed")
        self._trainer.add_callback(self._gate)
        self._thread: threading.Thread | None = None

    @property
    def losses(self) -> list[float]:
        """What the Trainer has logged."""
        return [row["loss"] for row in self._trainer.state.log_history if "loss" in row]

    @property
    def tokens(self) -> list[int]:
        """Trained tokens of each run; a Trainer reads one batch ahead, which counts where read."""
        return self._of_runs

    def run(self, steps: int) -> None:
        """Train for so many steps."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._train, daemon=True)
            self._gate.allow(steps)
            self._thread.start()
        else:
            self._gate.allow(steps)
        self._gate.wait()
        self._of_runs.append(self._tokens - sum(self._of_runs))

    def _train(self) -> None:
        try:
            self._trainer.train()
            raise RuntimeError("the Trainer has come to its end")
        except Exception as error:  # handed on to the thread that waits
            self._gate.fail(error)

    def _plain(self, data: Any, model: Any, settings: Settings, *, is_packed: bool) -> Trainer:
        rows, collate = settings.rows, self._packed
        if is_packed:
            data = pack_dataset(data, settings.seq_length, "bfd")
        else:
            lengths = [len(ids) for ids in data["input_ids"]]
            rows = round(settings.rows * settings.seq_length * len(lengths) / sum(lengths))
            data, collate = data.add_column("length", lengths), self._padded
        sampling = "random" if is_packed else "group_by_length"
        options = arguments(settings) | {"train_sampling_strategy": sampling}
        options |= {"per_device_train_batch_size": rows, "remove_unused_columns": False}
        return Trainer(
            model=model,
            args=TrainingArguments(**options),
            train_dataset=data,
            data_collator=collate,
        )

    def _trl(self, data: Any, model: Any, settings: Settings) -> Trainer:
        options = arguments(settings) | {"max_length": settings.seq_length, "packing": True}
        options |= {"per_device_train_batch_size": 1}
        options |= {"gradient_accumulation_steps": settings.rows}
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**options),
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(settings.model),
        )
        theirs = trainer.data_collator

        def counting(examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = theirs(examples)
            self._count(batch["labels"])
            return batch

        trainer.data_collator = counting
        return trainer

    def _packed(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Rows of one length, the positions of each conversation from 0 on, and no mask."""
        longest = max(len(example["input_ids"]) for example in examples)
        shape = len(examples), longest
        input_ids = torch.zeros(shape, dtype=torch.int64)
        positions, labels = torch.zeros_like(input_ids), torch.full(shape, IGNORED)
        for row, example in enumerate(examples):
            end = len(example["input_ids"])
            input_ids[row, :end] = torch.tensor(example["input_ids"])
            labels[row, :end] = torch.tensor(example["labels"])
            begin = 0
            for length in [*example["seq_lengths"], longest - end]:
                positions[row, begin : begin + length] = torch.arange(length)
                labels[row, begin : begin + 1] = IGNORED  # not the last conversation's next token
                begin += length
        self._count(labels)
        return {"input_ids": input_ids, "position_ids": positions, "labels": labels}

    def _padded(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        shape = len(examples), longest
        input_ids, mask = (
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape, dtype=torch.int64),
        )
        labels = torch.full(shape, IGNORED)
        for row, example in enumerate(examples):
            end = len(example["input_ids"])
            input_ids[row, :end] = torch.tensor(example["input_ids"])
            labels[row, :end] = torch.tensor(example["labels"])
            mask[row, :end] = 1
        self._count(labels)
        return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}

    def _count(self, labels: Tensor) -> None:
        self._tokens += int((labels[:, 1:] != IGNORED).sum())


class _Gate(TrainerCallback):  # type: ignore[misc]  # transformers is Any to mypy
    """Lets the Trainer's thread through for so many steps, and tells when they are done."""

    def __init__(self) -> None:
        self._left = 0
        self._go, self._done = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def allow(self, steps: int) -> None:
        """So many steps from now on."""
        self._left = steps
        self._done.clear()
        self._go.set()

    def wait(self) -> None:
        """Until they are done; raises what the Trainer has raised."""
        if not self._done.wait(DEADLINE_S):
            raise TimeoutError(f"the Trainer is not done after {DEADLINE_S} s")
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """The Trainer has ended with an error."""
        self._error = error
        self._done.set()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """At the end of each step, after the optimizer's."""
        self._left -= 1
        if self._left == 0:
            self._go.clear()
            self._done.set()
            self._go.wait()


def arguments(settings: Settings) -> dict[str, Any]:
    """What all Trainers are told; nothing that costs time and isles does not do."""
    return {
        "output_dir": str(settings.output),
        "max_steps": settings.max_steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "bf16": False,
        "logging_steps": 10,
        "logging_first_step": True,  # a smoke run has no tenth
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }


def make_model(settings: Settings) -> Any:
    """The model, or it frozen with an adapter beside every matrix but the head."""
    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if not settings.lora:
        return model
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def encode(settings: Settings) -> datasets.Dataset:
    """Every conversation as token ids, and as labels for what the assistant says."""
    return datasets.Dataset.from_list(list(_encoded(settings)))


def _encoded(settings: Settings) -> Iterator[dict[str, list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    for line in settings.conversations.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        ids: list[int] = []
        labels: list[int] = []
        for end in range(1, len(messages) + 1):
            longer = tokenizer.apply_chat_template(messages[:end], return_dict=False)
            silent = len(longer)
            if messages[end - 1]["role"] == "assistant":
                asked = tokenizer.apply_chat_template(
                    messages[: end - 1], add_generation_prompt=True, return_dict=False
                )
                silent = len(asked)
            labels += [IGNORED] * (silent - len(ids)) + longer[silent:]
            ids = longer
        yield {"input_ids": ids[: settings.seq_length], "labels": labels[: settings.seq_length]}

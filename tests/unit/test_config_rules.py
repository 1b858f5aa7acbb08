"""Rules between the keys of a run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.load import Loaded, load_run_file
from isles.config.rules import check_rules
from isles.errors import ConfigErrors
from tests.each import each

GOOD = """\
model: {name_or_path: gpt2}
data: {sources: [{path: a}]}
training:
  max_steps: 100
"""
SHAPE = ("model.name_or_path=llama-2m", "model.init=scratch")
BPE = "tokenizer.train_vocab_size=300"
FAKE = "data.sources=[{type: fake}]"


def load(tmp_path: Path, *overrides: str) -> Loaded:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD, encoding="utf-8")
    return load_run_file(file, overrides)


@each(
    ("overrides", "what", "fix"),
    [
        (["training.num_train_epochs=2"], "max_steps 100 and num_train_epochs 2", "keep one"),
        (["training.max_steps=null"], "the run has no length", "max_time"),
        (
            ["training.max_steps=null", "training.max_time=1h"],
            "cosine needs to know",
            "constant",
        ),
        (["training.warmup_steps=100"], "warmup_steps 100 leaves no step", "below 100"),
        (["training.decay_steps=5"], "means nothing to lr_scheduler_type cosine", "wsd"),
        (
            [
                "training.decay_steps=60",
                "training.lr_scheduler_type=wsd",
                "training.warmup_steps=50",
            ],
            "warmup_steps 50 + decay_steps 60 is more than max_steps 100",
            "at most 50",
        ),
        (
            ["training.min_lr_ratio=0.1", "training.lr_scheduler_type=constant"],
            "min_lr_ratio 0.1 means nothing",
            "cosine",
        ),
        (["training.micro_batch_size=128"], "64 is not a multiple of micro_batch_size 128", "auto"),
        (
            ["training.global_batch_size=500", "training.micro_batch_size=192"],
            "global_batch_size 500 is not a multiple of micro_batch_size 192",
            "use 384 or 576",
        ),
        (["model.name_or_path=llama-2m", BPE, FAKE], "no weights", "init: scratch"),
        (["model.name_or_path=llama-7b", "model.init=scratch"], "no shape", "./llama-7b"),
        ([*SHAPE], "llama-2m comes without a tokenizer", "train_vocab_size"),
        ([*SHAPE, BPE, "tokenizer.name_or_path=gpt2"], "two tokenizers", "keep one"),
        ([BPE], "the embeddings of gpt2 belong to another tokenizer", "init: scratch"),
        ([*SHAPE, FAKE, BPE], "no text to train a tokenizer on", "delete"),
        (["data.sources.1.type=fake"], "fake source stands among real", "alone"),
        (["data.sources=[{type: fake, path: a}]"], "a fake source has no path", "delete"),
        (["data.sources=[{split: x}]"], "this source has no path", "a glob"),
        (
            ["data.sources=[{path: a, weight: 1}, {path: b}]"],
            "source 2 has no weight",
            "every source",
        ),
        (
            ["clusters.0.environment.variables={HF_TOKEN: x, HF_TOKEN_PATH: y}"],
            "HF_TOKEN looks like a secret",
            "hf auth login",
        ),
        (
            [
                "clusters.0.launcher={kind: ssh, hosts: [a]}",
                "clusters.0.environment.python=~/venv/bin/python",
            ],
            "~/venv/bin/python is run as it is written",
            "as venv",
        ),
    ],
)
def test_a_broken_rule_is_reported(
    tmp_path: Path, overrides: list[str], what: str, fix: str
) -> None:
    with pytest.raises(ConfigErrors) as raised:
        load(tmp_path, *overrides)
    found = [issue for issue in raised.value.issues if what in issue.what]
    assert len(found) == 1, str(raised.value)
    assert fix in found[0].fix
    assert found[0].where.startswith(("command line ", f"{tmp_path}/run.yaml:"))


@each(
    "overrides",
    [
        [],
        ["training.max_time=1h"],
        ["training.max_steps=null", "training.num_train_epochs=0.5"],
        [
            "training.max_steps=null",
            "training.max_time=1h",
            "training.lr_scheduler_type=constant",
        ],
        ["training.decay_steps=50", "training.warmup_steps=50", "training.lr_scheduler_type=wsd"],
        [*SHAPE, BPE],
        [*SHAPE, FAKE],
        [*SHAPE, FAKE, "tokenizer.name_or_path=gpt2"],
        ["model.init=scratch", BPE],
        ["model.name_or_path=./llama-7b", "model.init=scratch"],
        ["data.sources=[{path: a, weight: 1}, {path: b, weight: 0.5}]"],
        ["training.micro_batch_size=64"],
    ],
)
def test_what_makes_sense_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    assert check_rules(load(tmp_path, *overrides).config) == []


def test_a_rule_names_the_line_of_a_key_that_was_given(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{GOOD}  micro_batch_size: 7\n", encoding="utf-8")
    with pytest.raises(ConfigErrors) as raised:
        load_run_file(file)
    (issue,) = raised.value.issues
    assert issue.where == f"{file}:5 training.micro_batch_size"
    assert issue.fix.startswith("use 63 or 70")

"""Law 5: every failure names its culprit, nothing waits for ever, the last good weights stay."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from isles.config.load import load_run_file
from isles.data.mix import build_datasets
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints, verify_checkpoint
from isles.run.records import read_record
from tests.data import quiet
from tests.deadline import DEADLINE_S
from tests.disks import small_disk
from tests.dist.test_resume import rows_after_start
from tests.dist.test_same_mathematics import weights_of
from tests.ranks import start_training, train_to_end


@pytest.fixture
def poisoned(run_file: Path) -> tuple[Path, str]:
    """A run file for a pretrained model that is NaN at one word, and that word's one document."""
    folder = run_file.parent / "poisoned"
    documents = [f"plain words number {n} and nothing else" for n in range(200)]
    tokenizer = train_tokenizer(documents, 300)
    tokenizer.add_tokens(["<poison>"])
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(run_file.parent / "tiny")
    model = AutoModelForCausalLM.from_config(config)
    row = tokenizer.convert_tokens_to_ids("<poison>")
    model.get_input_embeddings().weight.data[row] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    documents[123] += " <poison> here"
    words = run_file.parent / "poison.jsonl"
    words.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    content = yaml.safe_load(run_file.read_text())
    content["model"] = {"name_or_path": str(folder), "init": "pretrained"}
    content["tokenizer"] = {}
    content["data"] |= {"sources": [{"path": str(words)}], "validation_fraction": 0.0}
    run_file.write_text(yaml.safe_dump(content))
    return run_file, "<poison>"


def test_the_sample_and_the_rank_that_bring_nan_are_named(poisoned: tuple[Path, str]) -> None:
    run_file, word = poisoned
    run_dir, attempt, gang = start_training(run_file, 2, "training.max_steps=200")
    assert set(gang.wait()) == {ExitCode.TRAINING}
    error = read_record(attempt.rank_error(0)) or {}
    found = re.fullmatch(
        r"the loss of step (\d+) is not finite; rank (\d) on \S+: samples (\d+)", error["what"]
    )
    assert found, error["what"]
    step, rank, sample = map(int, found.groups())
    # The sample itself, read from the data once more, holds the word.
    tokenizer = load_tokenizer(str(run_dir.tokenizer))
    data = load_run_file(run_file).config.data
    cache = run_file.parent / "cache2"
    dataset, _ = build_datasets(data, tokenizer, cache, seed=0, progress=quiet)
    inputs, _, _ = dataset.rows(np.array([sample]))
    assert word in tokenizer.decode(inputs[0])
    assert sample // 12 == step - 1 and (sample % 12) // 6 == rank
    assert list_checkpoints(run_dir)[-1].step == step - 1


def check_that_the_last_good_weights_stay(
    run_file: Path, world_size: int, *options: str
) -> dict[str, torch.Tensor]:
    """A learning rate from hell blows up the weights within a few steps. Returns what is saved."""
    hell = ("training.learning_rate=100.0", "training.optimizer=sgd", "training.max_steps=200")
    run_dir, attempt, gang = start_training(
        run_file, world_size, *hell, "training.max_grad_norm=null", *options
    )
    assert set(gang.wait()) == {ExitCode.TRAINING}
    error = read_record(attempt.rank_error(0)) or {}
    assert "not finite" in error["what"]
    assert "rank " in error["what"] or "gradient" in error["what"]
    good = list_checkpoints(run_dir)[-1]
    assert f"step {good.step + 1}" in error["what"]
    assert good.manifest["samples"] == good.step * 12
    state = weights_of(run_dir, good.step)
    assert all(bool(torch.isfinite(v).all()) for n, v in state.items() if n.startswith("model."))
    return state


@pytest.mark.brief("1-32-true", "2-bf16-mixed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_that_is_not_finite(run_file: Path, precision: str, world_size: int) -> None:
    check_that_the_last_good_weights_stay(run_file, world_size, f"training.precision={precision}")


def check_that_a_killed_rank_is_noticed(run_file: Path, *options: str) -> None:
    """By the other of two ranks."""
    endless = ("training.max_steps=100000", "training.logging_steps=1")
    run_dir, attempt, gang = start_training(run_file, 2, *endless, *options)
    assert rows_after_start(run_dir, gang, 2)
    os.kill(gang.processes[1].pid or 0, signal.SIGKILL)
    gang.processes[0].join(DEADLINE_S)
    assert gang.processes[0].exitcode is not None
    error = read_record(attempt.rank_error(0)) or {}
    assert error["is_communication"]
    assert error["exit_code"] == ExitCode.COMMUNICATION


def test_a_killed_rank_is_noticed_by_the_others(run_file: Path) -> None:
    check_that_a_killed_rank_is_noticed(run_file)


def test_ranks_without_an_agent_end_when_their_run_directory_is_deleted(run_file: Path) -> None:
    saves = ("checkpoint.every_steps=2", "training.logging_steps=1")
    run_dir, _, gang = start_training(run_file, 2, "training.max_steps=100000", *saves)
    assert rows_after_start(run_dir, gang, 4)
    while run_dir.path.exists():  # what a rank writes meanwhile may keep a folder
        shutil.rmtree(run_dir.path, ignore_errors=True)
    assert gang.codes()[0] == ExitCode.TRAINING
    assert f"the run directory {run_dir.path} is not there any more" in gang.log.read_text()
    assert not run_dir.path.exists(), "nobody makes it again"


def test_full_disk_stops_with_a_clear_error_and_loses_nothing(
    run_file: Path, tmp_path: Path
) -> None:
    disk, saves = tmp_path / "small", ("checkpoint.every_steps=5", "checkpoint.keep=50")
    with small_disk(disk, "3m"):
        length = (f"output_dir={disk}", "training.max_steps=100")
        run_dir, code = train_to_end(run_file, 2, *length, *saves)
        assert code == ExitCode.TRAINING
        attempt = run_dir.last_attempt()
        assert attempt is not None
        errors = [read_record(attempt.rank_error(rank)) or {} for rank in range(2)]
        for words in ("could not be saved", "are free on this disk"):
            assert any(words in error.get("what", "") for error in errors)
        kept = list_checkpoints(run_dir)
        assert kept, "what was saved before stays"
        assert verify_checkpoint(kept[-1].path) == []

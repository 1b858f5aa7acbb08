"""Law 5: every failure names its culprit, nothing waits for ever, the last good weights stay."""

from __future__ import annotations

import errno
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isles.checkpoint import save as saving
from isles.config.load import load_run_file
from isles.data.mix import build_datasets
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints, verify_checkpoint
from isles.run.env import RankEnv
from isles.run.records import read_record
from tests.data import quiet, write_rows
from tests.disks import small_disk
from tests.dist.test_resume import until_recorded
from tests.dist.test_same_mathematics import give_weights, weights_of
from tests.ranks import one_rank, start_training


def test_the_sample_and_the_rank_that_bring_nan_are_named(run_file):
    """A pretrained model is NaN at one word, which one document has."""
    documents = [f"plain words number {n} and nothing else" for n in range(200)]
    tokenizer = train_tokenizer(documents, 300)
    tokenizer.add_tokens(["<poison>"])
    folder = run_file.parent / "tiny"
    tokenizer.save_pretrained(folder)
    model, row = give_weights(run_file), tokenizer.convert_tokens_to_ids("<poison>")
    model.get_input_embeddings().weight.data[row] = float("nan")
    model.save_pretrained(folder)
    documents[123] += " <poison> here"
    words = write_rows(run_file.parent / "poison.jsonl", ({"text": text} for text in documents))
    options = ("model.init=pretrained", "tokenizer={}", "training.max_steps=200")
    options += (f"data.sources=[{{path: {words}}}]", "data.validation_fraction=0.0")
    run_dir, attempt, gang = start_training(run_file, 2, *options)
    assert set(gang.wait()) == {ExitCode.TRAINING}
    error = read_record(attempt.rank_error(0)) or {}
    found = re.fullmatch(
        r"the loss of step (\d+) is not finite; rank (\d) on \S+: samples (\d+)", error["what"]
    )
    assert found, error["what"]
    step, rank, sample = map(int, found.groups())
    # The sample itself, read from the data once more, holds the word.
    data = load_run_file(run_file, options).config.data
    cache = run_file.parent / "cache2"
    dataset, _ = build_datasets(data, load_tokenizer(str(folder)), cache, seed=0, progress=quiet)
    inputs, _, _ = dataset.rows(np.array([sample]))
    assert "<poison>" in tokenizer.decode(inputs[0])
    assert sample // 12 == step - 1 and (sample % 12) // 6 == rank
    assert list_checkpoints(run_dir)[-1].step == step - 1


BLOWN_UP = [
    *itertools.product((1, 2), ["{kind: ddp}"], ("32-true", "bf16-mixed", "fp16-mixed")),
    (2, "{kind: ddp, pp_size: 2}", "32-true"),
    (2, "{kind: deepspeed, zero_stage: 1}", "32-true"),
    (2, "{kind: deepspeed, zero_stage: 1}", "bf16-mixed"),
    (2, "{kind: deepspeed, zero_stage: 2}", "bf16-mixed"),
    (2, "{kind: deepspeed, zero_stage: 3}", "32-true"),
]


@pytest.mark.brief(
    "1-{kind: ddp}-32-true",
    "2-{kind: ddp}-bf16-mixed",
    "2-{kind: deepspeed, zero_stage: 2}-bf16-mixed",
)
@pytest.mark.parametrize(("ranks", "strategy", "precision"), BLOWN_UP)
def test_loss_that_is_not_finite_leaves_the_last_good_weights(run_file, ranks, strategy, precision):
    """A learning rate from hell blows up the weights within a few steps."""
    hell = ("training.learning_rate=100.0", "training.optimizer=sgd", "training.max_steps=200")
    hell += ("training.max_grad_norm=null",)
    hell += (f"strategy={strategy}", f"training.precision={precision}")
    run_dir, attempt, gang = start_training(run_file, ranks, *hell)
    assert set(gang.wait()) == {ExitCode.TRAINING}
    error = read_record(attempt.rank_error(0)) or {}
    assert "not finite" in error["what"]
    assert "rank " in error["what"] or "gradient" in error["what"]
    good = list_checkpoints(run_dir)[-1]
    assert f"step {good.step + 1}" in error["what"]
    assert good.manifest["samples"] == good.step * 12
    for key, value in weights_of(run_dir, good.step).items():
        if key.startswith("model.") or "deepspeed" in strategy:
            assert bool(torch.isfinite(value).all()), key


@pytest.mark.parametrize("strategy", ["{kind: ddp}", "{kind: fsdp, pp_size: 2}"])
def test_a_killed_rank_is_noticed_by_the_others(run_file, strategy):
    endless = ("training.max_steps=100000", "training.logging_steps=1", f"strategy={strategy}")
    run_dir, attempt, gang = start_training(run_file, 2, *endless)
    until_recorded(run_dir, gang, 2)
    gang.processes[1].kill()
    assert gang.code(0) is not None
    error = read_record(attempt.rank_error(0)) or {}
    assert error["is_communication"]
    assert error["exit_code"] == ExitCode.COMMUNICATION


def test_ranks_without_an_agent_end_when_their_run_directory_is_deleted(run_file: Path) -> None:
    saves = ("checkpoint.every_steps=2", "training.logging_steps=1")
    run_dir, _, gang = start_training(run_file, 2, "training.max_steps=100000", *saves)
    until_recorded(run_dir, gang, 4)
    while run_dir.path.exists():  # what a rank writes meanwhile may keep a folder
        shutil.rmtree(run_dir.path, ignore_errors=True)
    assert gang.code(0) == ExitCode.TRAINING
    gang.kill()
    assert f"the run directory {run_dir.path} was deleted or moved" in gang.log.read_text()
    assert not run_dir.path.exists(), "nobody makes it again"


def rank_on_a_disk_that_keeps(env: RankEnv, *arguments: Any) -> tuple[int, list[str]]:
    """A rank whose disk does not let files go that are read, as NFS; what it has read back."""
    remove, verify = shutil.rmtree, saving.verify_checkpoint
    verified = list[str]()

    def refuse(path: Path, **options: Any) -> None:
        if Path(path).name.startswith(".partial-removed") and not options:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path, **options)

    def noted(folder: Path, **options: bool) -> list[str]:
        verified.append(folder.name)
        return verify(folder, **options)

    shutil.rmtree, saving.verify_checkpoint = refuse, noted
    return one_rank(env, *arguments), verified


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(run_file: Path) -> None:
    """And the last one, which was just saved, is not read back once more at the end."""
    saves = ("checkpoint.every_steps=2", "checkpoint.keep=1", "training.max_steps=4")
    how: Any = {"rank": rank_on_a_disk_that_keeps}
    run_dir, _, gang = start_training(run_file, 2, *saves, **how)
    (code, verified), _ = gang.wait()
    assert code == 0 and [info.step for info in list_checkpoints(run_dir)] == [4]
    assert verified == [".partial-step-00000002", ".partial-step-00000004"]
    assert "the next attempt will" in gang.log.read_text()


def test_full_disk_stops_with_a_clear_error_and_loses_nothing(run_file, tmp_path):
    disk, saves = tmp_path / "small", ("checkpoint.every_steps=5", "checkpoint.keep=50")
    with small_disk(disk, "3m"):
        length = (f"output_dir={disk}", "training.max_steps=100")
        run_dir, attempt, gang = start_training(run_file, 2, *length, *saves)
        assert max(gang.wait()) == ExitCode.TRAINING
        errors = [read_record(attempt.rank_error(rank)) or {} for rank in range(2)]
        for words in ("cannot save step", "free on this disk"):
            assert any(words in error.get("what", "") for error in errors)
        kept = list_checkpoints(run_dir)
        assert kept, "what was saved before stays"
        assert verify_checkpoint(kept[-1].path) == []

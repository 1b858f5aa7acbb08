"""An epoch reads each row once: its last step is smaller, and law 1 holds for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.run.checkpoints import find_checkpoint
from isles.run.paths import RunDir
from isles.run.records import read_rows
from tests.dist.test_same_mathematics import TOLERANCE, largest_difference, model_with
from tests.ranks import refusal, train

ROWS = 10
EPOCHS = (
    "training.max_steps=null",
    "training.num_train_epochs=2",
    "training.global_batch_size=4",
    "training.lr_scheduler_type=constant",
    "training.warmup_steps=0",
    "training.logging_steps=1",
    "data.validation_fraction=0",
)


@pytest.fixture
def few(run_file: Path, words: Path) -> Path:
    """A run file of ten rows, a sample each."""
    lines = words.read_text().splitlines(keepends=True)
    words.write_text("".join(sorted(lines, key=len)[20 : 20 + ROWS]))
    return run_file


def targets_of(run_dir: RunDir) -> list[int]:
    """Tokens that each step has trained on."""
    seen = [row["target_tokens"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    return [after - before for before, after in zip([0, *seen], seen, strict=False)]


def check_same(few: Path, reference: RunDir, ranks: int, *values: str) -> None:
    run_dir = train(few, ranks, *EPOCHS, *values, resume="no")
    assert targets_of(run_dir) == targets_of(reference)
    assert find_checkpoint(run_dir, None).manifest["samples"] == 2 * ROWS
    assert largest_difference(run_dir, reference) < TOLERANCE


def test_epochs_end_with_a_smaller_step_on_one_rank_and_on_three(few: Path) -> None:
    """Of 4, 4 and 2 rows, the last ones over three ranks."""
    reference = train(few, 1, *EPOCHS)
    manifest = find_checkpoint(reference, None).manifest
    assert (manifest["step"], manifest["samples"]) == (6, 2 * ROWS)
    targets = targets_of(reference)
    assert sum(targets[:3]) == sum(targets[3:]), "each epoch has every row once"
    check_same(few, reference, 3, "strategy.kind=fsdp")


@pytest.mark.long
def test_epochs_are_the_same_by_any_strategy(few: Path) -> None:
    model_with(few, num_hidden_layers=4)
    reference = train(few, 1, *EPOCHS)
    one, two = "training.micro_batch_size=1", "training.micro_batch_size=2"
    check_same(few, reference, 1, two)
    check_same(few, reference, 2, "strategy.kind=ddp", "balance={'0': 3, '1': 1}")
    check_same(few, reference, 2, "strategy={kind: ddp, tp_size: 2}")
    # Two micro-batches a rank in a whole step, and one in the last step of an epoch.
    check_same(few, reference, 2, "strategy={kind: deepspeed, zero_stage: 3}", one)
    for schedule in ("1f1b", "interleaved-1f1b", "zbv"):
        pipeline = f"strategy={{kind: ddp, pp_size: 2, pp_schedule: {schedule}}}"
        check_same(few, reference, 2, pipeline, one)
        check_same(few, reference, 2, pipeline, two)


@pytest.mark.long
def test_epochs_go_on_where_they_ended(few: Path) -> None:
    whole = train(few, 2, *EPOCHS)
    half = train(few, 2, *EPOCHS, "training.num_train_epochs=0.8", resume="no")
    assert find_checkpoint(half, None).manifest["samples"] == 8
    resumed = train(few, 2, *EPOCHS, resume=str(half.path))
    assert resumed.path == half.path and find_checkpoint(resumed, None).manifest["step"] == 6
    assert largest_difference(whole, resumed) == 0


@pytest.mark.long
def test_a_warm_up_that_is_longer_than_the_epochs_is_refused_before_the_first_step(few: Path):
    text = str(refusal(few, 1, *EPOCHS, "training.warmup_steps=100"))
    assert "training.warmup_steps" in text and "the 6 steps of num_train_epochs 2" in text

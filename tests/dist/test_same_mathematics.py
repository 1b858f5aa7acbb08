"""Law 1: one process, several ranks, any accumulation: the same weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from isles.checkpoint.load import SafeReader, load_tensors
from isles.run.checkpoints import find_checkpoint
from isles.run.paths import RunDir
from isles.run.records import read_rows
from tests.ranks import train_to_end


def weights_of(run_dir: RunDir, step: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, weights and optimizer state."""
    folder = find_checkpoint(run_dir, step).path
    metadata = SafeReader(str(folder)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)  # type: ignore[union-attr]
        for name, item in metadata.items()
    }
    load_tensors(state, folder, alone=True)
    return state


def eval_loss(run_dir: RunDir) -> float:
    """Of the evaluation at the end; every rank had another part of it."""
    return float(next(r["loss"] for r in read_rows(run_dir.metrics) if r["kind"] == "eval"))


def largest_difference(left: RunDir, right: RunDir) -> float:
    """Over all weights of the newest checkpoints."""
    one, other = weights_of(left), weights_of(right)
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max()) for name in one if name.startswith("model.")
    )


CASES = [
    ("adamw", "true", 1e-5, [(1, 6), (1, 3), (2, 6), (2, 3), (2, 1)]),
    ("adamw", "false", 1e-5, [(1, 3), (2, 2)]),
    ("adamw", "false", 1e-5, [(2, 6), (3, 2)]),
    ("sgd", "false", 1e-5, [(1, 3), (2, 3)]),
    ("muon", "true", 1e-5, [(1, 3), (2, 6)]),
]


@pytest.mark.brief("adamw-false-1e-05-splits1")
@pytest.mark.parametrize(("optimizer", "packing", "tolerance", "splits"), CASES)
def test_ranks_and_accumulation_change_nothing(
    run_file: Path,
    optimizer: str,
    packing: str,
    tolerance: float,
    splits: list[tuple[int, int]],
) -> None:
    """20 steps of one process with the whole batch, against ranks and micro-batches."""
    common = (f"data.packing={packing}", f"training.optimizer={optimizer}")
    reference, code = train_to_end(run_file, 1, *common, "training.micro_batch_size=12")
    assert code == 0
    one_step = ("training.max_steps=1", "training.warmup_steps=0", "training.learning_rate=1e-30")
    start, _ = train_to_end(run_file, 1, *common, *one_step, resume="no")
    moved = largest_difference(reference, start)
    assert moved > 10 * tolerance, "the reference has learnt too little to compare with"
    for world_size, micro in splits:
        override = f"training.micro_batch_size={micro}"
        run_dir, code = train_to_end(run_file, world_size, *common, override, resume="no")
        assert code == 0
        difference = largest_difference(reference, run_dir)
        assert difference < tolerance, (world_size, micro, difference)
        assert math.isclose(eval_loss(run_dir), eval_loss(reference), rel_tol=10 * tolerance)


@pytest.mark.brief("bf16-mixed-selective")
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed", "bf16-true"])
def test_every_precision_learns(run_file: Path, precision: str, checkpointing: str) -> None:
    """Two ranks; the loss after 20 steps is close to that of fp32, which falls by half a nat."""
    options = (f"training.precision={precision}", "training.learning_rate=0.01")
    checkpoint = f"training.gradient_checkpointing={checkpointing}"
    run_dir, code = train_to_end(run_file, 2, *options, checkpoint)
    assert code == 0
    losses = [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5

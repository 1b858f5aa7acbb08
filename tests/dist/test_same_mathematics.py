"""Law 1: one process, several ranks, any accumulation: the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isles.checkpoint.load import SafeReader, load_tensors
from isles.run.checkpoints import find_checkpoint
from isles.run.paths import RunDir
from isles.run.records import read_rows
from tests.ranks import train

TOLERANCE = 1e-5


def model_with(run_file: Path, **values: object) -> None:
    """Change the tiny model's config."""
    path = run_file.parent / "tiny" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


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


def figures_of(run_dir: RunDir, name: str = "loss", *, kind: str = "train") -> list[float]:
    """Of the recorded steps, or (eval) of the evaluations, of which every rank had its part."""
    return [float(row[name]) for row in read_rows(run_dir.metrics) if row["kind"] == kind]


def largest_difference(left: RunDir, right: RunDir) -> float:
    """Over all weights of the newest checkpoints."""
    one, other = weights_of(left), weights_of(right)
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max()) for name in one if name.startswith("model.")
    )


def check_that_it_has_learnt(run_file: Path, reference: RunDir, *overrides: str) -> None:
    """Else the weights of any run would be those of the reference."""
    one_step = ("training.max_steps=1", "training.warmup_steps=0", "training.learning_rate=1e-30")
    start = train(run_file, 1, *overrides, *one_step, resume="no")
    assert largest_difference(reference, start) > 10 * TOLERANCE


CASES = [
    ("adamw", "true", [(1, 6), (1, 3), (2, 6), (2, 3), (2, 1)]),
    ("adamw", "false", [(1, 3), (2, 2)]),
    ("adamw", "false", [(2, 6), (3, 2)]),
    ("sgd", "false", [(1, 3), (2, 3)]),
    ("muon", "true", [(1, 3), (2, 6)]),
]


@pytest.mark.brief("adamw-false-splits1")
@pytest.mark.parametrize(("optimizer", "packing", "splits"), CASES)
def test_ranks_and_accumulation_change_nothing(
    run_file: Path, optimizer: str, packing: str, splits: list[tuple[int, int]]
) -> None:
    """20 steps of one process with the whole batch, against ranks and micro-batches."""
    common = (f"data.packing={packing}", f"training.optimizer={optimizer}")
    reference = train(run_file, 1, *common, "training.micro_batch_size=12")
    check_that_it_has_learnt(run_file, reference, *common)
    for world_size, micro in splits:
        size = f"training.micro_batch_size={micro}"
        run_dir = train(run_file, world_size, *common, size, resume="no")
        assert largest_difference(reference, run_dir) < TOLERANCE, (world_size, micro)
        evaluations = figures_of(reference, kind="eval")
        assert figures_of(run_dir, kind="eval") == pytest.approx(evaluations, rel=10 * TOLERANCE)


@pytest.mark.brief("bf16-mixed-selective")
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed", "bf16-true"])
def test_every_precision_learns(run_file: Path, precision: str, checkpointing: str) -> None:
    check_that_it_learns(
        run_file,
        f"training.precision={precision}",
        f"training.gradient_checkpointing={checkpointing}",
    )


def check_that_it_learns(run_file: Path, *overrides: str) -> RunDir:
    """On two ranks, about as fast as in fp32: in 20 steps the loss falls by half a nat."""
    run_dir = train(run_file, 2, "training.learning_rate=0.01", *overrides)
    losses = figures_of(run_dir)
    assert losses[-1] < losses[0] - 0.5
    return run_dir

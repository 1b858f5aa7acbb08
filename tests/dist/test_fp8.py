"""fp8-mixed in whole runs: two ranks learn, and a run changes between it and bf16-mixed.

The fp8 products are emulated, and the blocks run uncompiled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from isles.checkpoint.tensors import TensorReader
from isles.run.checkpoints import find_checkpoint
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from tests.dist.test_same_mathematics import FAKE, figures_of, weights_of
from tests.ranks import one_rank, refusal, start_training

FP8, BF16 = "training.precision=fp8-mixed", "training.precision=bf16-mixed"
FAST = ("training.learning_rate=0.01", "data.packing=true")


def rank_in_fp8(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank of training on a CPU that emulates fp8."""
    from torchao.float8 import Float8LinearConfig

    from isles.train import build, fp8

    fp8._settings = lambda: Float8LinearConfig(emulate=True)
    build.check_devices = lambda *_: None
    build.compile_blocks = lambda *_: None
    return one_rank(env, run, attempt, resume_from)


def train(run_file: Path, ranks: int, *overrides: str, resume: str = "no") -> RunDir:
    run_dir, _, gang = start_training(
        run_file, ranks, *FAST, *overrides, resume=resume, rank=rank_in_fp8
    )
    assert not any(gang.wait()), gang.said()
    return run_dir


def entries(run_dir: RunDir) -> dict[str, Any]:
    """Names, types and shapes of the tensors of the newest checkpoint."""
    tensors = TensorReader(find_checkpoint(run_dir, None).path).index().tensors
    return {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}


@pytest.mark.brief("{kind: fsdp}-2-selective")
@pytest.mark.parametrize(
    ("strategy", "ranks", "checkpointing"),
    [
        ("{kind: ddp}", 1, "none"),
        ("{kind: ddp}", 2, "full"),
        ("{kind: fsdp}", 2, "selective"),
        ("{kind: fsdp, cp_size: 2}", 2, "none"),
    ],
)
def test_ranks_learn_in_fp8_about_as_in_bf16(run_file, strategy, ranks, checkpointing):
    options = (f"strategy={strategy}", f"training.gradient_checkpointing={checkpointing}")
    options += ("training.logging_steps=2",)
    exact, found = (train(run_file, ranks, *options, kind) for kind in (BF16, FP8))
    losses = figures_of(found)
    assert losses[-1] < losses[0] - 0.5
    assert losses != figures_of(exact)
    assert losses == pytest.approx(figures_of(exact), rel=0.02)


def test_a_run_changes_between_fp8_and_bf16_and_nothing_else_notices(run_file):
    """Checkpoints have the same tensors, which any of the two loads; and so has the export."""
    constant = ("training.lr_scheduler_type=constant", "training.warmup_steps=1", *FAKE)
    saved = (*constant, "checkpoint.export_on_finish=true")
    parts = [("{kind: ddp}", FP8), ("{kind: fsdp}", BF16), ("{kind: fsdp}", FP8)]
    resume, found = "no", []
    for steps, (strategy, precision) in enumerate(parts, 1):
        options = (f"training.max_steps={2 * steps}", f"strategy={strategy}", precision)
        run_dir = train(run_file, 2, *saved, *options, resume=resume)
        assert find_checkpoint(run_dir, None).step == 2 * steps
        found.append(entries(run_dir))
        resume = str(run_dir.path)
    assert found[0] == found[1] == found[2]
    assert {kind for kind, _ in found[0].values()} <= {"float32", "int64"}
    trained = weights_of(run_dir)
    exported = AutoModelForCausalLM.from_pretrained(run_dir.model)
    for name, value in exported.state_dict().items():
        assert value.equal(trained[f"model.{name}"]), name


def test_a_cpu_is_refused_before_the_start(run_file):
    error = refusal(run_file, 2, *FAST, FP8)
    assert "missing on rank 0 on" in error["what"] and " and rank 1 on" in error["what"]
    assert error["fix"] == "use training.precision: bf16-mixed"

"""What only a GPU can show; every test here has a CPU twin, named in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.config.model import ModelConfig
from isles.config.training import TrainingConfig
from isles.dist.batch import Batch
from isles.dist.world import join_world, leave_world
from isles.models.attention import use_maskless_attention
from isles.models.build import build_model
from isles.rundir.env import RankEnv
from isles.rundir.records import read_record, read_rows
from isles.strategies.ddp import DDPEngine
from isles.train.optimizer import make_optimizers
from tests.e2e.test_train import isles, the_run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed", "bf16-true"])
def test_a_whole_run_on_one_gpu(run_file: Path, precision: str) -> None:
    """CPU twin: tests/e2e/test_train.py, test_a_whole_run_and_what_it_leaves."""
    options = (f"training.precision={precision}", "clusters.0.gpus_per_node=1")
    isles("train", str(run_file), *options, "training.max_steps=60", cwd=run_file.parent)
    run_dir = the_run(run_file)
    rows = [row for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["memory_bytes"] < 4 * 2**30, "memory of the GPU, not of the process"
    launch = read_record(run_dir.attempts()[-1].launch) or {}
    assert launch["device"] == "cuda"


def test_no_step_waits_for_the_gpu(tiny_model: Path) -> None:
    """CPU twin: tests/unit/test_no_sync.py."""
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cuda", timeout_s=60)
    try:
        config = TrainingConfig(max_steps=10)
        model = build_model(
            ModelConfig(name_or_path=str(tiny_model), init="scratch"),
            device=world.device,
            dtype=torch.float32,
            seed=0,
            vocab_size=None,
        )
        assert use_maskless_attention(model)
        engine = DDPEngine(
            model,
            lambda m: make_optimizers(config, m),
            world,
            precision="bf16-mixed",
            comm_sample_every=10,
        )
        ids = torch.arange(32, device=world.device).reshape(2, 16)
        batch = Batch(ids, ids, (0, 1))

        def step() -> None:
            engine.forward_backward(batch, global_tokens=32, is_last=True)
            engine.optimizer_step(lr=1e-3, max_norm=1.0)

        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.good_steps() is None
    finally:
        leave_world()


def test_the_largest_micro_batch_is_found(run_file: Path) -> None:
    """CPU twin: tests/unit/test_probe.py."""
    options = ("clusters.0.gpus_per_node=1", "training.max_steps=5", "training.warmup_steps=0")
    isles("train", str(run_file), *options, cwd=run_file.parent)
    log = the_run(run_file).attempts()[-1].rank_log(0).read_text()
    assert "micro_batch_size=12 was found to fit" in log

"""What only a GPU can show; every test here has a CPU twin, named in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.dist.batch import Batch
from isles.dist.world import join_world, leave_world
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.train.metrics import StepMeter
from tests.dist.test_same_mathematics import figures_of
from tests.e2e.typed import isles, the_run
from tests.engines import engine_of, fake_run

pytestmark = pytest.mark.gpu


def train(run_file: Path, *options: str) -> RunDir:
    """60 steps on one GPU, by the command; the loss falls."""
    one = ("clusters.0.gpus_per_node=1", "training.max_steps=60")
    isles("train", str(run_file), *one, *options, cwd=run_file.parent)
    run_dir = the_run(run_file)
    losses = figures_of(run_dir)
    assert losses[-1] < losses[0]
    return run_dir


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed", "bf16-true"])
def test_a_whole_run_on_one_gpu(run_file: Path, precision: str) -> None:
    """CPU twin: tests/e2e/test_train.py, test_a_whole_run_and_what_it_leaves."""
    run_dir = train(run_file, f"training.precision={precision}")
    memory = figures_of(run_dir, "memory_bytes")
    assert memory[-1] < 4 * 2**30, "memory of the GPU, not of the process"
    launch = read_record(run_dir.attempts()[-1].launch) or {}
    assert launch["device"] == "cuda"


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "sgd", "muon"])
@pytest.mark.parametrize("strategy", [DDPStrategyConfig(), FSDPStrategyConfig()])
def test_no_step_waits_for_the_gpu(tiny_model, strategy, optimizer, monkeypatch):
    """Also no recorded step, before its row. CPU twins: tests/unit/test_optimizer.py, test_host.py.
    liger-kernel waits once in each micro-batch."""
    monkeypatch.setattr("isles.strategies.head._find_liger", lambda: None)
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cuda", timeout_s=60)
    try:
        engine = engine_of(fake_run(tiny_model, optimizer=optimizer), strategy, world)
        ids = torch.arange(32, device=world.device).reshape(2, 16)
        batch, meter = Batch(ids, ids, (0, 1)), StepMeter(world, 1.0, 0.0)

        def step() -> None:
            meter.begin(is_recorded=True)
            engine.forward_backward(batch, loss_divisor=32, is_last=True)
            meter.mark("forward_backward")
            engine.optimizer_step(lr=1e-3, max_norm=1.0)
            meter.mark("optimizer")

        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.good_steps() is None
    finally:
        leave_world()


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "32-true"])
@pytest.mark.parametrize(
    "strategy",
    [
        "{kind: fsdp}",
        "{kind: fsdp, cpu_offload: true}",
        "{kind: deepspeed, zero_stage: 2}",
        "{kind: deepspeed, zero_stage: 3, offload_optimizer: cpu, offload_param: cpu}",
    ],
)
def test_other_strategies_learn_on_one_gpu(run_file: Path, strategy: str, precision: str) -> None:
    """CPU twins: tests/dist/test_strategies.py, tests/dist/test_deepspeed.py."""
    train(run_file, f"strategy={strategy}", f"training.precision={precision}")


def test_the_largest_micro_batch_is_found(run_file: Path) -> None:
    """CPU twin: tests/unit/test_balance.py."""
    log = train(run_file).attempts()[-1].rank_log(0).read_text()
    assert "micro_batch_size=12 fits" in log

"""A step that is not recorded never waits for the device: no number is read back to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isles.config.model import ModelConfig
from isles.config.training import TrainingConfig
from isles.dist.batch import Batch
from isles.dist.world import join_world, leave_world
from isles.models.attention import use_maskless_attention
from isles.models.build import build_model
from isles.rundir.env import RankEnv
from isles.strategies.ddp import DDPEngine
from isles.train.metrics import Speed, StepMeter
from isles.train.optimizer import make_optimizers


class ReadsToHost(TorchDispatchMode):
    """Counts what `.item()`, `bool(tensor)` and `float(tensor)` turn into."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_reads_nothing_back(tiny_model: Path, optimizer: Any, precision: Any) -> None:
    cpu = torch.device("cpu")
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cpu", timeout_s=10)
    try:
        config = TrainingConfig(max_steps=10, optimizer=optimizer, precision=precision)
        model = build_model(
            ModelConfig(name_or_path=str(tiny_model), init="scratch"),
            device=cpu,
            dtype=torch.float32,
            seed=0,
            vocab_size=None,
        )
        assert use_maskless_attention(model)
        engine = DDPEngine(
            model,
            lambda m: make_optimizers(config, m),
            world,
            precision=precision,
            comm_sample_every=10,
        )
        meter = StepMeter(world, Speed(1.0, None))
        ids = torch.arange(32).reshape(2, 16)
        batch = Batch(ids, ids, (0, 1))

        def step() -> None:
            meter.begin(is_recorded=False)
            meter.add(engine.forward_backward(batch, global_tokens=32, is_last=True))
            engine.optimizer_step(lr=1e-3, max_norm=1.0)
            meter.step_done(32)

        step()  # optimizers look at numbers when they make their state
        with ReadsToHost() as reads:
            step()
        assert reads.count == 0
        with ReadsToHost() as reads:
            engine.good_steps()
        assert reads.count > 0, "the counter sees what it should see"
    finally:
        leave_world()

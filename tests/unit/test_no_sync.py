"""A step that is not recorded never waits for the device: no number is read back to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isles.config.sections.data import DataConfig, SourceConfig
from isles.config.sections.model import ModelConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.dist.batch import Batch
from isles.dist.world import join_world, leave_world
from isles.models.attention import use_maskless_attention
from isles.models.build import build_empty_model, build_model, fill_model
from isles.run.env import RankEnv
from isles.train.metrics import StepMeter
from isles.train.optimizer import make_optimizers
from isles.train.strategy import is_sharded, make_engine, resolve_mesh
from tests.each import each


class ReadsToHost(TorchDispatchMode):
    """Counts what `.item()`, `bool(tensor)` and `float(tensor)` turn into."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


CASES = [
    (strategy, precision, optimizer)
    for strategy in (DDPStrategyConfig(), FSDPStrategyConfig())
    for precision in ("32-true", "bf16-mixed", "fp16-mixed")
    for optimizer in ("adamw", "sgd")
    # torch's fused SGD knows no shards; the step waits there, as docs/architecture.md says. So it
    # does with torchao's AdamW, and with Muon.
    if optimizer != "sgd" or isinstance(strategy, DDPStrategyConfig)
]


@each(("strategy", "precision", "optimizer"), CASES)
def test_a_step_reads_nothing_back(
    tiny_model: Path, strategy: Any, precision: Any, optimizer: Any
) -> None:
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cpu", timeout_s=10)
    try:
        config = RunConfig(
            model=ModelConfig(name_or_path=str(tiny_model), init="scratch"),
            data=DataConfig(sources=(SourceConfig(type="fake"),)),
            training=TrainingConfig(max_steps=10, optimizer=optimizer, precision=precision),
        )
        if is_sharded(strategy):
            model = build_empty_model(config.model, dtype=torch.float32, vocab_size=None)
        else:
            model = build_model(
                config.model,
                device=world.device,
                dtype=torch.float32,
                seed=0,
                vocab_size=None,
            )
        assert use_maskless_attention(model)
        engine = make_engine(
            strategy,
            model,
            lambda module: fill_model(module, config.model, seed=0),
            lambda module: make_optimizers(config.training, module),
            resolve_mesh(strategy, world),
            world,
            config,
        )
        meter = StepMeter(world, 1.0)
        ids = torch.arange(32).reshape(2, 16)
        batch = Batch(ids, ids, (0, 1))

        def step() -> None:
            meter.begin(is_recorded=False)
            meter.add(engine.forward_backward(batch, loss_divisor=32, is_last=True))
            engine.optimizer_step(lr=1e-3, max_norm=1.0)
            meter.step_done(tokens=32, loss_divisor=32, padding_share=0.0)

        step()  # optimizers look at numbers when they make their state
        with ReadsToHost() as reads:
            step()
        assert reads.count == 0
        with ReadsToHost() as reads:
            engine.good_steps()
        assert reads.count > 0, "the counter sees what it should see"
    finally:
        leave_world()

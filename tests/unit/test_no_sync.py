"""A step that is not recorded never waits for the device: no number is read back to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.dist.batch import Batch
from isles.dist.world import join_world, leave_world
from isles.run.env import RankEnv
from isles.train.metrics import StepMeter
from tests.each import each
from tests.engines import engine_of, fake_run


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
        config = fake_run(tiny_model, optimizer=optimizer, precision=precision)
        engine = engine_of(config, strategy, world)
        meter = StepMeter(world, 1.0, 0.0)
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

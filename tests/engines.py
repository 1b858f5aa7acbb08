"""Engines of the tiny model, for tests that take steps by themselves."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isles.config.layout import Strategy
from isles.config.sections.data import DataConfig, SourceConfig
from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.training import TrainingConfig
from isles.dist.world import World
from isles.models.attention import use_maskless_attention
from isles.models.build import build_empty_model, build_model, fill_model
from isles.models.recompute import set_gradient_checkpointing
from isles.strategies.base import Engine
from isles.train.model import weights_dtype
from isles.train.optimizer.make import make_optimizers
from isles.train.strategy import is_sharded, make_engine, resolve_mesh


def fake_run(model: Path, adapter: AdapterConfig | None = None, **training: Any) -> RunConfig:
    """The run file of ten steps of a model on fake data: from fresh weights, or of an adapter."""
    return RunConfig(
        model=ModelConfig(name_or_path=str(model), init="pretrained" if adapter else "scratch"),
        adapter=adapter or AdapterConfig(),
        data=DataConfig(sources=(SourceConfig(type="fake"),)),
        training=TrainingConfig(max_steps=10, **training),
    )


def engine_of(
    config: RunConfig, strategy: Strategy, world: World, vocab_size: int | None = None
) -> Engine:
    """The engine of a run with seed 0. All ranks must call this."""
    options: dict[str, Any] = {
        "dtype": weights_dtype(config.training.precision),
        "vocab_size": vocab_size,
        "adapter": config.adapter,
    }
    if is_sharded(strategy):
        model = build_empty_model(config.model, **options)
    else:
        model = build_model(config.model, device=world.device, seed=0, **options)
    set_gradient_checkpointing(model, config.training.gradient_checkpointing)
    assert use_maskless_attention(model)
    fill = functools.partial(fill_model, config=config.model, seed=0)
    optimizers = functools.partial(make_optimizers, config.training, seed=0)
    mesh = resolve_mesh(strategy, world)
    return make_engine(strategy, model, fill, optimizers, mesh, world, config)


class ReadsToHost(TorchDispatchMode):
    """Counts what `.item()`, `bool(tensor)` and `float(tensor)` turn into."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

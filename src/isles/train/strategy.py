"""From the section `strategy` to the grid of ranks and the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import assert_never

from torch import nn
from torch.optim import Optimizer

from isles.config.layout import Strategy, make_layout
from isles.config.run import RunConfig
from isles.config.strategy import (
    AutoStrategy,
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.dist.mesh import Mesh, make_mesh
from isles.dist.world import World
from isles.strategies.base import Engine

log = logging.getLogger(__name__)

MakeOptimizers = Callable[[nn.Module], Sequence[Optimizer]]


def settle_strategy(config: RunConfig, world: World) -> Strategy:
    """The run file's strategy; for `auto`, the one that is chosen. All ranks must call this."""
    match config.strategy:
        case AutoStrategy():
            return DDPStrategyConfig()
        case chosen:
            return chosen


def settle_mesh(strategy: Strategy, world: World) -> Mesh:
    """The grid of a strategy's ranks. All ranks must call this."""
    layout = make_layout(strategy, world.world_size, local_world_size=world.local_world_size)
    return make_mesh(layout, world, is_sharded=is_sharded(strategy))


def is_sharded(strategy: Strategy) -> bool:
    """Whether the model is built without weights, cut, and filled piece by piece (FSDP2)."""
    match strategy:
        case AutoStrategy() | DeepSpeedStrategyConfig():
            return False
        case DDPStrategyConfig():
            # DistributedDataParallel knows no cut parameters: FSDP2 with shards of one rank is
            # the same mathematics.
            return strategy.tp_size > 1 or strategy.pp_size > 1
        case FSDPStrategyConfig():
            return True


def runs_in_step(strategy: Strategy) -> bool:
    """Whether all ranks must make the same number of micro-steps."""
    return not isinstance(strategy, DDPStrategyConfig) or is_sharded(strategy)


def make_engine(
    strategy: Strategy,
    model: nn.Module,
    make_optimizers: MakeOptimizers,
    mesh: Mesh,
    world: World,
    config: RunConfig,
) -> Engine:
    """The engine of a strategy. All ranks must call this."""
    match strategy:
        case DDPStrategyConfig():
            from isles.strategies.ddp import DDPEngine

            return DDPEngine(
                model,
                make_optimizers,
                world,
                precision=config.training.precision,
                comm_sample_every=config.training.logging_steps,
            )
        case FSDPStrategyConfig() | DeepSpeedStrategyConfig() | AutoStrategy():
            raise NotImplementedError
        case _:
            assert_never(strategy)

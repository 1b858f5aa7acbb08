"""The grid of ranks: the data, tensor, context and pipeline parallel part of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from isles.config.sections.strategy import (
    AutoStrategy,
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.errors import ConfigError

Strategy = AutoStrategy | DDPStrategyConfig | FSDPStrategyConfig | DeepSpeedStrategyConfig


@dataclass(frozen=True, slots=True)
class MeshCoordinates:
    """Place of a rank on each axis of the grid."""

    pp: int
    replicate: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The grid of ranks. The last axis varies fastest from rank to rank: pp, replicate, dp_shard,
    cp, tp; so tensor-parallel ranks are adjacent, and pipeline stages are farthest apart.

    Args:
        pp, cp, tp: sizes of the model-parallel axes.
        replicate: number of groups that each hold a sharded copy of the model.
        dp_shard: number of ranks of such a group that read different data.
        cut: number of layers of each stage of the pipeline, in order. Empty: all ranks are equally
            fast and have equal memory.
    """

    pp: int
    replicate: int
    dp_shard: int
    cp: int
    tp: int
    cut: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_size * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.replicate * self.dp_shard

    def place(self, rank: int) -> MeshCoordinates:
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        rank, dp_shard = divmod(rank, self.dp_shard)
        pp, replicate = divmod(rank, self.replicate)
        return MeshCoordinates(pp, replicate, dp_shard, cp, tp)

    def dp_rank(self, rank: int) -> int:
        """The data part of a rank. Ranks with the same number read the same rows."""
        place = self.place(rank)
        return place.replicate * self.dp_shard + place.dp_shard


def make_layout(strategy: Strategy, world_size: int, *, local_world_size: int) -> Layout:
    """The grid of a strategy on `world_size` ranks. ConfigError: the sizes do not divide them.

    `local_world_size`: ranks on one node, and the default of HYBRID_SHARD for a copy.
    """
    match strategy:
        case AutoStrategy() | DeepSpeedStrategyConfig():
            return Layout(1, 1, world_size, 1, 1)
        case DDPStrategyConfig():
            dp = _data_parallel(strategy, world_size)
            return Layout(strategy.pp_size, dp, 1, strategy.cp_size, strategy.tp_size)
        case FSDPStrategyConfig():
            dp = _data_parallel(strategy, world_size)
            shard = _shard_size(strategy, dp, local_world_size)
            return Layout(strategy.pp_size, dp // shard, shard, strategy.cp_size, strategy.tp_size)


def _data_parallel(strategy: DDPStrategyConfig | FSDPStrategyConfig, world_size: int) -> int:
    unit = strategy.tp_size * strategy.cp_size * strategy.pp_size
    if world_size % unit == 0:
        return world_size // unit
    sizes = ((name, getattr(strategy, name)) for name in ("tp_size", "cp_size", "pp_size"))
    product = " x ".join(f"{name} {size}" for name, size in sizes if size > 1)
    keys = [name for name in ("tp_size", "cp_size", "pp_size") if getattr(strategy, name) > 1]
    raise ConfigError(
        f"{product} needs a multiple of {unit} ranks, and the run has {world_size}",
        where=f"strategy.{keys[0]}",
        fix=f"use {unit} ranks or a multiple (gpus_per_node), or "
        + (f"sizes whose product divides {world_size}" if world_size > 1 else "sizes of 1"),
        id="strategy.sizes",
    )


def _shard_size(strategy: FSDPStrategyConfig, dp: int, local_world_size: int) -> int:
    match strategy.sharding_strategy:
        case "NO_SHARD":
            return 1
        case "FULL_SHARD" | "SHARD_GRAD_OP":
            return dp
        case "HYBRID_SHARD" | "HYBRID_SHARD_ZERO2":
            inside = strategy.tp_size * strategy.cp_size
            wanted = strategy.shard_size or max(1, min(dp, local_world_size // inside))
            if wanted > dp or dp % wanted:
                given = "shard_size" if strategy.shard_size else "the ranks of a node,"
                raise ConfigError(
                    f"{given} {wanted} does not divide the {dp} data-parallel ranks",
                    where="strategy.shard_size",
                    fix=f"use a divisor of {dp}, or sharding_strategy: FULL_SHARD",
                    id="strategy.sizes",
                )
            return wanted

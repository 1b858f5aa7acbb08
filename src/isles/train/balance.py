"""How many rows each rank takes, and in which micro-batches."""

from __future__ import annotations

from isles.config.layout import Strategy
from isles.config.run import RunConfig
from isles.config.split import RowSplit, even_split
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.rundir.manifest import CheckpointInfo
from isles.train.strategy import runs_in_step


def choose_split(
    config: RunConfig,
    strategy: Strategy,
    mesh: Mesh,
    world: World,
    micro_batch_size: int,
    resume_from: CheckpointInfo | None,
) -> RowSplit:
    """The split with which a start begins. All ranks must call this."""
    return even_split(
        config.training.global_batch_size,
        mesh.dp_size,
        micro_batch_size,
        in_step=runs_in_step(strategy),
    )

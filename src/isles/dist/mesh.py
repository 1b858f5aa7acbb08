"""The grid of ranks as torch's device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from isles.config.layout import Layout, MeshCoordinates
from isles.dist.world import World


@dataclass(frozen=True, slots=True)
class Mesh:
    """The process groups through which a rank shares the model.

    Args:
        layout: the grid.
        place: this rank's position in the grid.
        root: axes pp, replicate, shard (data and context parallel together) and tp; None if every
            rank holds the whole model (plain data parallel).
        cp_group: the ranks that share this rank's sequences; None if cp is 1.
        deals_ends: a rank that shares a sequence has a piece of its first half and a piece of its
            second half, so that all have the same work. Otherwise it has one piece.
        offloaded: blocks that this rank keeps in main memory under `cpu_offload: auto`; see
            `offloaded_blocks`.
    """

    layout: Layout
    place: MeshCoordinates
    root: DeviceMesh | None
    cp_group: dist.ProcessGroup | None
    deals_ends: bool = False
    offloaded: int = 0

    @property
    def dp_rank(self) -> int:
        """Index of the data shard that this rank reads."""
        return self.place.replicate * self.layout.dp_shard + self.place.dp_shard

    @property
    def dp_size(self) -> int:
        """Number of data shards."""
        return self.layout.dp_size


def make_mesh(layout: Layout, world: World, *, is_sharded: bool, deals_ends: bool = False) -> Mesh:
    """Make the process groups of a grid. All ranks must call this.

    Args:
        layout: the grid, of the world's size.
        is_sharded: whether the strategy needs `root`.
        deals_ends: see `Mesh`.
    """
    assert layout.world_size == world.world_size, (layout, world.world_size)
    root = None
    if is_sharded:
        sizes = (layout.pp, layout.replicate, layout.dp_shard * layout.cp, layout.tp)
        root = init_device_mesh(
            world.device.type, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp")
        )
        for group in root.get_all_groups():
            # A mesh gives its groups torch's default timeout of 30 minutes instead of the
            # world's timeout.
            _set_pg_timeout(timedelta(seconds=world.timeout_s), group)
    members: dict[tuple[int, int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        place = layout.place(rank)
        key = (place.pp, place.replicate, place.dp_shard, place.tp)
        members.setdefault(key, []).append(rank)
    cp_group = None
    for ranks in members.values() if layout.cp > 1 else ():
        # torch requires every rank to make every group.
        group = dist.new_group(ranks, timeout=timedelta(seconds=world.timeout_s))
        if world.rank in ranks:
            cp_group = group
    return Mesh(layout, layout.place(world.rank), root, cp_group, deals_ends)

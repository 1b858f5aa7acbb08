"""What the ranks have: memory and links, measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from isles.dist.world import World

_LINK_BYTES = 32 * 2**20
_LINK_REPEATS = 3


class Company:
    """Ranks that measure at the same time, as they will compute at the same time.

    Whether some of them share processors, as virtual machines of one computer do, cannot be known.
    One that measured while the others were not yet there, or done, would seem faster than it is.

    Args:
        world: all ranks, each of which must call the same.
    """

    def __init__(self, world: World) -> None:
        self._group = world.control

    def begin(self) -> None:
        """Wait until all are there."""
        dist.barrier(group=self._group)

    def go_on(self, work: Callable[[], object]) -> None:
        """Keep this rank at work until all have come here."""
        others = dist.barrier(group=self._group, async_op=True)
        assert others is not None  # it is, of a group that this rank is in
        while not others.is_completed():
            work()
        others.wait()

    def all_say(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        votes = torch.tensor([int(yes)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())


def least_memory_bytes(world: World) -> int:
    """Memory of the rank that has least: of its GPU, or its part of the machine's on a CPU.

    All ranks must call this.
    """
    if world.device.type == "cuda":
        mine = int(torch.cuda.get_device_properties(world.device).total_memory)
    else:
        mine = psutil.virtual_memory().total // world.local_world_size
    return min(world.gather(mine))


def link_bytes_per_s(world: World) -> float:
    """Bytes a second that each rank sends in an all-reduce over all. All ranks must call this.

    That is the bus bandwidth of NVIDIA's nccl-tests: 2 (n - 1) / n of the buffer, over its time.
    """
    buffer = torch.zeros(_LINK_BYTES // 4, device=world.device)
    best = float("inf")
    for _ in range(_LINK_REPEATS):
        dist.barrier()
        _wait(world)
        began = time.perf_counter()
        dist.all_reduce(buffer)
        _wait(world)
        best = min(best, time.perf_counter() - began)
    sent = 2 * (world.world_size - 1) / world.world_size * _LINK_BYTES
    return min(world.gather(sent / best))


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)

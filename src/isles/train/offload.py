"""Blocks that a rank keeps in main memory, because its GPU has no room for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from isles.config.layout import Strategy
from isles.config.memory import offloaded_blocks, step_memory
from isles.config.roofline import PCIE, count_of, offloaded_bytes
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import FSDPStrategyConfig
from isles.dist.mesh import Mesh
from isles.dist.world import World, gpu_bytes
from isles.errors import UserError
from isles.facts.memory.setting import usable_bytes
from isles.facts.units import format_bytes
from isles.run.limits import memory
from isles.train.model import architecture_of


def offload_blocks(
    model: nn.Module,
    config: RunConfig,
    strategy: Strategy,
    mesh: Mesh,
    world: World,
    tell: Callable[[str], None],
) -> Mesh:
    """The grid with the blocks that this rank keeps in main memory under `cpu_offload: auto`. All
    ranks must call this.

    Args:
        model: the whole model, used for its shapes only.
        tell: shows a line to the user.

    Raises:
        UserError: names a rank without enough main memory, the same on every rank.
    """
    if not (isinstance(strategy, FSDPStrategyConfig) and strategy.cpu_offload == "auto"):
        return mesh
    size, gpu, layout = architecture_of(model), gpu_bytes(world.device), mesh.layout
    given = config.training.micro_batch_size
    wanted = given.get(world.host) if isinstance(given, dict) else given
    rows = wanted if isinstance(wanted, int) else None
    count = 0
    if gpu:  # on a CPU, everything is in main memory in any case
        limit = usable_bytes(gpu)
        count = offloaded_blocks(
            size, config, strategy, layout, limit=limit, rows=rows, gpu_bytes=gpu
        )
    moved = step_memory(size, config, strategy, layout, rows=1, offloaded=count).host
    copied = offloaded_bytes(count_of(size, config, strategy, layout, 1, 2, gpu, count), layout)
    room = memory().available / world.local_world_size
    every = world.gather((world.host, world.device_name, count, moved, copied, room))
    for rank, (host, device, blocks, held, sent, free) in enumerate(every):
        name = f"rank {rank} on {host} ({device})"
        what = f"{blocks} of {size.layers} blocks in main memory ({format_bytes(held)})"
        if held > free:
            raise UserError(
                f"{name} has no room for {what}: its share of the free main memory is "
                f"{format_bytes(free)}",
                where="strategy.cpu_offload",
                fix="use more GPUs, a smaller data.seq_length, adapter: {type: qlora}, or a host "
                "with more main memory",
                id="memory.offload",
            )
        if blocks and world.is_main:
            copies = f"copies {format_bytes(sent)} for each micro-batch, about {sent / PCIE:.2g} s"
            tell(f"cpu_offload auto: {name} keeps {what}, and {copies}")
    if world.is_main and not any(blocks for _, _, blocks, *_ in every):
        is_cpu = world.device.type == "cpu"
        why = "it has no effect on CPU ranks" if is_cpu else "all blocks fit on the GPUs"
        tell(f"cpu_offload auto: {why}")
    return replace(mesh, offloaded=count)

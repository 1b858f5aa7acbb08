"""The layers of each stage of a pipeline whose ranks are unequal."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from isles.config.balance import deal_layers, pipeline_speeds, stage_speeds
from isles.config.layout import Layout, Strategy
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.dist.mesh import Mesh
from isles.dist.world import World, gpu_bytes
from isles.facts.memory.layers import rank_of_stage
from isles.facts.memory.setting import usable_bytes
from isles.run.limits import memory
from isles.train.balance import device_name, rank_shares
from isles.train.model import architecture_of
from isles.train.probe import measure_blocks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PipelineCut:
    """The cut of a pipeline, as a checkpoint keeps it.

    Args:
        devices: host and device of each rank.
        schedule: of the run file.
        speeds: rows per second of each rank through all blocks, in any unit.
        layers: of each stage.
        is_kept: whether the checkpoint that the run resumes from has the same layers on the same
            devices. If not, a micro-batch size of the checkpoint was not measured with them.
    """

    devices: tuple[tuple[str, str], ...]
    schedule: str
    speeds: tuple[float, ...]
    layers: tuple[int, ...]
    is_kept: bool = field(default=False, compare=False)

    def record(self, measured: Sequence[float | None], layout: Layout) -> dict[str, Any]:
        """The cut for a manifest.

        Args:
            measured: seconds of one row through the blocks of each rank, in real steps; None: not
                known.
        """
        own = [0] * layout.pp
        for stage, count in enumerate(self.layers):
            own[rank_of_stage(stage, layout.pp, returns=self.schedule == "zbv")] += count
        speeds = [
            own[layout.place(rank).pp] / row_s for rank, row_s in enumerate(measured) if row_s
        ]
        is_known = len(speeds) == len(self.speeds)
        return {
            "devices": [list(device) for device in self.devices],
            "schedule": self.schedule,
            "speeds": speeds if is_known else list(self.speeds),
            "layers": list(self.layers),
        }

    @classmethod
    def read(cls, record: object) -> PipelineCut | None:
        """The cut of a manifest. None: the manifest has no readable cut."""
        try:
            assert isinstance(record, dict)
            devices = tuple((str(host), str(name)) for host, name in record["devices"])
            speeds = tuple(float(speed) for speed in record["speeds"])
            layers = tuple(int(count) for count in record["layers"])
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        numbers = (*speeds, *layers)
        if not numbers or min(numbers) <= 0 or len(speeds) != len(devices):
            return None
        return cls(devices, str(record.get("schedule")), speeds, layers)


def cut_pipeline(
    model: nn.Module,
    config: RunConfig,
    strategy: Strategy,
    mesh: Mesh,
    world: World,
    manifest: Mapping[str, Any],
) -> tuple[Mesh, PipelineCut | None]:
    """The grid with the layers of each stage, by the speed and memory of its ranks. All ranks must
    call this.

    On the same devices, a resumed run keeps its cut, unless its steps have shown that another cut
    is faster by 10 %, or its cut no longer fits.

    Args:
        model: the whole model, used for its shapes only.
        manifest: of the checkpoint that the run resumes from.

    Returns:
        The grid, and the cut for checkpoints; None without a pipeline.
    """
    layout = mesh.layout
    if layout.pp == 1:
        return mesh, None
    assert isinstance(strategy, DDPStrategyConfig | FSDPStrategyConfig)
    devices = tuple(world.gather((world.host, device_name(world))))
    before = PipelineCut.read(manifest.get("pipeline"))
    if before is not None and (before.devices, before.schedule) != (devices, strategy.pp_schedule):
        before = None
    speeds = _speeds(model, config, mesh, world, before, devices)
    own = gpu_bytes(world.device) or memory().total // world.local_world_size
    limits = world.gather(usable_bytes(own))
    gpu = min(world.gather(gpu_bytes(world.device)))

    # Their own cut stays with their own shares; only steps can show that another cut is faster.
    may_keep = before is not None and (
        config.balance == "auto" or list(before.speeds) == list(speeds)
    )

    def decide() -> PipelineCut:
        layers = deal_layers(
            architecture_of(model),
            config,
            strategy,
            layout,
            speeds=speeds,
            limits=limits,
            gpu_bytes=gpu,
            before=before.layers if before is not None and may_keep else (),
            size_before=manifest.get("micro_batch_size"),
        )
        is_kept = before is not None and before.layers == layers
        return PipelineCut(devices, strategy.pp_schedule, tuple(speeds), layers, is_kept)

    # One rank decides, so that rounding cannot lead to different cuts.
    cut = world.main_first(decide)
    of_stages = stage_speeds(layout, cut.speeds)
    shares = " : ".join(f"{speed / max(of_stages):.2g}" for speed in of_stages)
    counts = " ".join(map(str, cut.layers))
    log.info("pipeline: layers of each stage %s, speeds of its ranks %s", counts, shares)
    if before is not None and before.layers != cut.layers:
        log.info("pipeline: before the checkpoint, stages had the layers %s", before.layers)
    return replace(mesh, layout=replace(layout, cut=cut.layers)), cut


def _speeds(
    model: nn.Module,
    config: RunConfig,
    mesh: Mesh,
    world: World,
    before: PipelineCut | None,
    devices: Sequence[tuple[str, str]],
) -> list[float]:
    # Of each rank, in any unit.
    cluster, balance = config.clusters[0], config.balance
    hosts = [host for host, _ in devices]
    if isinstance(balance, dict):
        may_miss = cluster.min_nodes < cluster.max_nodes
        rank_shares(balance, hosts, may_miss=may_miss)  # refuses unknown names
        return pipeline_speeds(config, hosts, ())
    if balance == "auto" and before is not None:
        return list(before.speeds)
    if balance == "even" or len(set(devices)) == 1:
        return [1.0] * world.world_size
    every = world.gather(measure_blocks(model, config, mesh, world))
    measured = [None if row_s is None else 1 / row_s for row_s, _ in every]
    if None in measured or not all(is_settled for _, is_settled in every):
        log.info(
            "balance: the measured speeds did not settle, or a GPU had no room to measure. All "
            "ranks of the pipeline count as equally fast"
        )
        return [1.0] * world.world_size
    return pipeline_speeds(config, hosts, measured)

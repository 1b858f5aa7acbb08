"""Pipeline parallel engine: successive blocks of the model on successive ranks, with FSDP2
inside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isles.config.sections.strategy import FSDPStrategyConfig
from isles.dist.batch import COMPUTE_DTYPE, Batch
from isles.dist.mesh import Mesh
from isles.dist.world import World, is_communication_error
from isles.errors import CommunicationError, UserError
from isles.facts.memory.layers import assign_layers
from isles.strategies.base import TorchEngine
from isles.strategies.fsdp import allocate, shard_model
from isles.strategies.pipeline.stages import (
    Inputs,
    MicroBatches,
    Pipeline,
    check_model,
    cut_stage,
    stage_indices,
    stages_per_rank,
)
from isles.strategies.routers import Routers, places_read
from isles.strategies.sequence import localize
from isles.strategies.stepper import MakeOptimizers, Stepper


class PipelineEngine(TorchEngine):
    """A model whose blocks are spread over several ranks in order. See `strategies.base.Engine`.

    Micro-batches are held until the last micro-batch of a step; then all go through the pipeline.
    The rank of the last stage has the whole step's loss, the other ranks have zero.

    Args:
        model: the whole model on the meta device, with its attention set, not sharded yet.
        config: sharding of a stage over its ranks; NO_SHARD: each of them holds it whole.
        costs: work of a block and of the head; they decide which layers a stage has.
        parallelize: applies tensor parallel, if used, to a stage on the meta device, in place.

    Raises:
        UserError: the model cannot be split into stages.
    """

    def __init__(
        self,
        model: Any,
        materialize: Callable[[nn.Module], None],
        make_optimizers: MakeOptimizers,
        config: FSDPStrategyConfig,
        mesh: Mesh,
        world: World,
        *,
        precision: str,
        costs: tuple[int, int],
        parallelize: Callable[[nn.Module], nn.Module],
    ) -> None:
        size = mesh.layout.pp
        num_stages = size * stages_per_rank(config.pp_schedule)
        check_model(model)
        dtype = COMPUTE_DTYPE.get(precision, torch.float32)
        each, head = costs
        layers = assign_layers([each] * len(model.base_model.layers), num_stages, head=head)
        stages: dict[int, nn.Module] = {}
        for index in stage_indices(config.pp_schedule, mesh.place.pp, size):
            ends = {"is_first": index == 0, "is_last": index == num_stages - 1}
            stage = stages[index] = cut_stage(model, layers[index], **ends, dtype=dtype)
            parallelize(stage)
            sharded = shard_model(stage, config, mesh, world.device, precision=precision)
            if stages_per_rank(config.pp_schedule) > 1:
                # These schedules gather and release a stage by themselves. A block released after
                # its forward pass would have no gradients if backward is split in two (zbv).
                for module in sharded:
                    module.set_reshard_after_forward(False, recurse=False)
            allocate(stage, config, world.device)
            materialize(stage)
        modules = list(stages.values())
        self._modules: list[Any] = modules
        held = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        group = _pipeline_group(mesh, world)
        stepper = Stepper(
            modules, make_optimizers, device=world.device, precision=precision, stages=group
        )
        super().__init__(held, None, stepper, mesh, world)
        # The ranks of one stage are neighbors: the axis pp varies slowest.
        self.replicas = divmod(world.rank, world.world_size // size)[1], world.world_size // size
        self._pipeline = Pipeline(
            stages,
            config.pp_schedule,
            group,
            world.device,
            hidden=(int(model.config.hidden_size), dtype),
            loss=self._loss,
        )
        self._held = MicroBatches()
        # FSDP2 averages over the data-parallel ranks, but we need the global sum.
        self._parts = mesh.dp_size * mesh.layout.cp
        self._scale = 1.0
        self._loss_total = torch.zeros((), device=world.device)

    def forward_backward(self, batch: Batch, *, loss_divisor: int, is_last: bool) -> Tensor:
        # Only the last call in a step computes.
        read_Bt = None if self.routers is None else places_read(batch, self._mesh)
        self._held.hold(replace(self._inputs(batch), read=read_Bt))
        self._loss_total = torch.zeros((), device=self._world.device)
        if is_last:
            self._scale = self._parts / loss_divisor
            for stage in self._modules:
                stage.router_scale = self._parts * self._stepper.loss_scale
            count = self._pipeline.count(len(self._held))
            with self._naming_itself():
                self._pipeline.train(self._held.take(count), count)
            assert all(p.grad is not None for p in self.trainable()), "a gradient was lost"
        return self._counted(self._loss_total)

    def use_routers(self, routers: Routers) -> None:
        self.routers = routers
        for stage in self._modules:
            routers.attach(stage)
            stage.routers = routers

    def evaluate(self, batch: Batch) -> Tensor:
        with torch.no_grad(), self._naming_itself():
            loss_sum = self._pipeline.forward(self._inputs(batch))
        if loss_sum is None:
            return torch.zeros((), device=self._world.device)
        return self._counted(loss_sum)

    @torch.no_grad()
    def row_scores(self, batch: Batch) -> Tensor:
        with self._naming_itself():
            losses_BT = self._pipeline.forward(self._inputs(batch), of_tokens=True)
        if losses_BT is None:
            return torch.zeros(len(batch.targets_BT), device=self._world.device)
        return -losses_BT.sum(1)

    def take_figures(self, *, of_training: bool) -> Mapping[str, Tensor]:
        del of_training
        return {}  # the loss is the only metric

    def trained_shapes(self) -> Mapping[str, torch.Size]:
        # No rank of a pipeline has a part of every weight.
        raise UserError(
            f"several clusters cannot average a pipeline (pp_size is {self._mesh.layout.pp})",
            where="strategy.pp_size",
            fix="set it to 1; kind: fsdp shards any model, also over nodes",
        )

    def _inputs(self, batch: Batch) -> Inputs:
        return Inputs.of(batch, localize(batch, self._mesh, model=None))

    def _loss(self, loss_sum: Tensor, _targets_BT: Tensor) -> Tensor:
        # Of one micro-batch.
        self._loss_total += loss_sum.detach()
        return self._stepper.scaled(loss_sum * self._scale, loss_sum)

    @contextlib.contextmanager
    def _naming_itself(self) -> Iterator[None]:
        # Adds the stage to an error; torch wraps the cause in its own error.
        try:
            yield
        except RuntimeError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            if is_communication_error(cause):
                raise self._lost(cause) from error
            if cause is error:
                raise
            raise cause from None

    def _lost(self, cause: BaseException) -> CommunicationError:
        world = self._world
        mine = ", ".join(map(str, self._pipeline.stages))
        plural = "s" if len(self._pipeline.stages) > 1 else ""
        return CommunicationError(
            f"stage{plural} {mine} (0 to {self._pipeline.num_stages - 1}) of the pipeline lost "
            f"another rank, or waited for it longer than {world.timeout_s:.0f} s "
            f"({str(cause).strip().splitlines()[0]})",
            where=f"rank {world.rank} on {world.host}; its pipeline has the ranks "
            f"{', '.join(map(str, self._pipeline.ranks))}",
            fix="find the rank that failed first with `isles logs`; if no rank failed and steps "
            "are "
            "only slow, raise clusters.0.comm_timeout",
            id="rank.others",
        )


def _pipeline_group(mesh: Mesh, world: World) -> dist.ProcessGroup:
    # The ranks of this rank's pipeline; torch requires every rank to make every group. Not the
    # mesh's own groups: these have torch's default timeout, not that of the run file.
    apart = world.world_size // mesh.layout.pp
    mine: dist.ProcessGroup | None = None
    for first in range(apart):
        ranks = list(range(first, world.world_size, apart))
        group = dist.new_group(ranks, timeout=timedelta(seconds=world.timeout_s))
        if world.rank in ranks:
            mine = group
    assert mine is not None
    return mine

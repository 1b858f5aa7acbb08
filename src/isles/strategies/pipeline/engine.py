"""Pipeline parallel engine: successive blocks of the model on successive ranks, with FSDP2
inside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from isles.config.sections.strategy import FSDPStrategyConfig
from isles.dist.batch import COMPUTE_DTYPE, Batch
from isles.dist.mesh import Mesh
from isles.dist.world import World, is_communication_error
from isles.errors import CommunicationError
from isles.strategies.base import TorchEngine
from isles.strategies.fsdp import hold
from isles.strategies.pipeline.stages import (
    Inputs,
    MicroBatches,
    Pipeline,
    check_model,
    cut_stage,
    holder_of,
    stage_indices,
    stages_per_rank,
)
from isles.strategies.pipeline.tied import TiedHead, forget_embedding, is_tied
from isles.strategies.pipeline.whole import WholeStages
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
        layers: the layers of each stage.
        is_whole: whether each rank of a stage holds it whole, without FSDP2.
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
        layers: Sequence[range],
        is_whole: bool,
        parallelize: Callable[[nn.Module], nn.Module],
    ) -> None:
        size = mesh.layout.pp
        num_stages = size * stages_per_rank(config.pp_schedule)
        check_model(model)
        dtype = COMPUTE_DTYPE.get(precision, torch.float32)
        self._shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        self._sharded: list[FSDPModule] = []
        self._whole = None
        if is_whole:
            self._whole = WholeStages(world.device, precision, _peers(mesh, world))
        stages: dict[int, nn.Module] = {}
        for index in stage_indices(config.pp_schedule, mesh.place.pp, size):
            ends = {"is_first": index == 0, "is_last": index == num_stages - 1}
            stage = stages[index] = cut_stage(model, layers[index], **ends, dtype=dtype)
            if self._whole is not None:
                self._whole.add(stage, materialize)
                continue
            parallelize(stage)
            sharded = hold(stage, config, mesh, world.device, precision=precision)
            self._sharded += sharded
            if stages_per_rank(config.pp_schedule) > 1:
                # These schedules gather and release a stage by themselves. A block released after
                # its forward pass would have no gradients if backward is split in two (zbv).
                for module in sharded:
                    module.set_reshard_after_forward(False, recurse=False)
            materialize(stage)
        modules = list(stages.values())
        self._modules: list[Any] = modules
        held = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        group = _pipeline_group(mesh, world)
        last = num_stages - 1
        self._tied: TiedHead | None = None
        if is_tied(model) and model.get_input_embeddings().weight.requires_grad:
            holders = 0, holder_of(config.pp_schedule, last, size)
            self._tied = TiedHead(stages, last, group, holders)
            self._tied.hide(True)
        if is_tied(model) and last in stages:
            forget_embedding(stages[last])
        stepper = Stepper(
            modules, make_optimizers, device=world.device, precision=precision, stages=group
        )
        if self._tied is not None:
            self._tied.hide(False)
        super().__init__(held, None, stepper, mesh, world)
        # By their names in the whole model, and without the copy of a tied head.
        learned = {id(p) for p in stepper.parameters}
        self._trained = {n: p for m in modules for n, p in m.named_parameters() if id(p) in learned}
        self._group = group
        self._homes: dict[str, int] = {}
        """Rank of the pipeline that trains each weight; found at the first use."""
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
        self._parts = 1 if is_whole else mesh.dp_size * mesh.layout.cp
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
                with self._computing():
                    self._pipeline.train(self._held.take(count), count)
                assert all(p.grad is not None for p in self.trainable()), "a gradient was lost"
                with self._pipeline.waiting.sending():
                    if self._tied is not None:
                        self._tied.send_gradient()
                    if self._whole is not None:
                        self._whole.add_gradients(self.trainable())
        return self._counted(self._loss_total)

    def use_routers(self, routers: Routers) -> None:
        self.routers = routers
        for stage in self._modules:
            routers.attach(stage)
            stage.routers = routers

    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        with self._naming_itself():
            norm = super().optimizer_step(lr=lr, max_norm=max_norm)
            if self._tied is not None:
                with self._pipeline.waiting.sending():
                    self._tied.send_weight()
        return norm

    def evaluate(self, batch: Batch) -> Tensor:
        with torch.no_grad(), self._naming_itself(), self._computing():
            loss_sum = self._pipeline.forward(self._inputs(batch))
        if loss_sum is None:
            return torch.zeros((), device=self._world.device)
        return self._counted(loss_sum)

    @torch.no_grad()
    def row_scores(self, batch: Batch) -> Tensor:
        with self._naming_itself(), self._computing():
            losses_BT = self._pipeline.forward(self._inputs(batch), of_tokens=True)
        if losses_BT is None:
            return torch.zeros(len(batch.targets_BT), device=self._world.device)
        return -losses_BT.sum(1)

    def take_figures(self, *, of_training: bool) -> Mapping[str, Tensor]:
        del of_training
        return {}  # the loss is the only metric

    def communication_s(self) -> float | None:
        return self._pipeline.waiting.seconds()

    def trained_shapes(self) -> Mapping[str, torch.Size]:
        return self._shapes

    def whole_weight(self, name: str) -> Tensor:
        # The ranks of its stage gather it, and each sends it to the other ranks of its pipeline.
        if not self._homes:
            for rank, names in enumerate(self._world.gather([*self._trained])):
                self._homes |= dict.fromkeys(names, self._mesh.layout.place(rank).pp)
        if name in self._trained:
            value = super().whole_weight(name).contiguous()
        else:
            value = torch.empty(self._shapes[name], device=self._world.device)
        dist.broadcast(value, group=self._group, group_src=self._homes[name])
        return value

    def whole_weights(self, names: Sequence[str]) -> list[Tensor]:
        return [self.whole_weight(name) for name in names]

    def set_whole_weight(self, name: str, value: Tensor) -> None:
        if name in self._trained:
            super().set_whole_weight(name, value)

    def add_to_weight(self, name: str, value: Tensor) -> None:
        if name in self._trained:
            super().add_to_weight(name, value)

    def weights_set(self) -> None:
        if self._tied is not None:
            self._tied.send_weight()
        for module in self._sharded:
            module.reshard()

    def _computing(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._whole is None else self._whole.computing()

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


def _peers(mesh: Mesh, world: World) -> dist.ProcessGroup | None:
    # The ranks of this rank's stage, which are neighbors; torch requires every rank to make every
    # group.
    together = world.world_size // mesh.layout.pp
    if together == 1:
        return None
    mine: dist.ProcessGroup | None = None
    for first in range(0, world.world_size, together):
        ranks = list(range(first, first + together))
        group = dist.new_group(ranks, timeout=timedelta(seconds=world.timeout_s))
        if world.rank in ranks:
            mine = group
    return mine


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

"""DistributedDataParallel: the whole model on every rank, and averaged gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isles.config.sections.strategy import DDPStrategyConfig
from isles.dist.batch import IGNORE_INDEX, Batch
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.strategies.base import TorchEngine
from isles.strategies.mixed_precision import MixedPrecision
from isles.strategies.objective import CausalLM, MakeObjective
from isles.strategies.stepper import MakeOptimizers, Stepper


class DDPEngine(TorchEngine):
    """One process, or several processes with copies of the model. See `strategies.base.Engine`.

    Args:
        comm_sample_every: number of steps between measurements of communication time.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizers: MakeOptimizers,
        config: DDPStrategyConfig,
        mesh: Mesh,
        world: World,
        *,
        precision: str,
        comm_sample_every: int,
        make_objective: MakeObjective = CausalLM,
    ) -> None:
        objective = make_objective(model)
        stepper = Stepper([model], make_optimizers, device=world.device, precision=precision)
        super().__init__(model, objective, stepper, mesh, world)
        self._must_learn_graph = config.static_graph and world.world_size > 1
        self._precision = MixedPrecision(model, precision, world.device)
        self._ddp: DistributedDataParallel | None = None
        self._forward: nn.Module = model
        if world.world_size > 1:
            self._ddp = _wrap(model, config, world, comm_sample_every)
            self._forward = self._ddp

    def forward_backward(self, batch: Batch, *, loss_divisor: int, is_last: bool) -> Tensor:
        # DDP averages over ranks, but we need the global sum over global tokens.
        scale = self._world.world_size / loss_divisor
        if not self._must_learn_graph:
            return self._backward(batch, scale, syncs=is_last)
        # DDP learns a static graph from the first backward pass, which must not skip the reduction.
        self._must_learn_graph = False
        others_go_on = max(self._world.gather(not is_last))
        loss_sum = self._backward(batch, scale, syncs=True)
        if is_last and others_go_on:
            # A last, empty micro-batch for the ranks that still need a reduction: it has no
            # targets.
            nothing = torch.full_like(batch.targets_BT, IGNORE_INDEX)
            again = replace(batch, targets_BT=nothing, places_N=None)
            self._backward(again, scale, syncs=True)
        return loss_sum

    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        # The gradients are views of the buckets, so the step zeroes them in place.
        return self._step(lr=lr, max_norm=max_norm, keep_gradients=self._ddp is not None)

    def communication_s(self) -> float | None:
        # The part of DDP's all-reduce that did not overlap with computation.
        if self._ddp is None:
            return 0.0
        timed: Any = self._ddp
        timing = timed._get_ddp_logging_data()
        if "backward_comm_time" not in timing:
            return None
        hidden = timing.get("backward_compute_comm_overlap_time", 0)
        return max(0, int(timing["backward_comm_time"]) - int(hidden)) / 1e9

    def _backward(self, batch: Batch, scale: float, *, syncs: bool) -> Tensor:
        quiet = self._ddp is not None and not syncs
        self._begin_routers(batch, self._world.world_size)
        # Earlier micro-batches only add to the local gradient; the last one reduces the sum.
        quietly = self._ddp.no_sync() if quiet and self._ddp else contextlib.nullcontext()
        with quietly, self._precision.micro_batch():
            with self._precision.forward():
                loss_sum = self._loss_sum(self._forward, batch)
            loss = self._stepper.scaled(loss_sum * scale, loss_sum)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with self._precision.micro_batch(), self._precision.forward():
            yield


def _wrap(
    model: nn.Module, config: DDPStrategyConfig, world: World, comm_sample_every: int
) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.11 has it only under the old name
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            # Otherwise every gradient exists twice, once in its bucket.
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # buffers are constants, and equal on all ranks
            # The weights are equal already; checking that would send a frozen model over the
            # network.
            init_sync=all(p.requires_grad for p in model.parameters()),
            bucket_cap_mb=config.bucket_cap_mb,
            static_graph=config.static_graph,
        )
    # torch compares the hook's annotations with types, but ours are strings: so a lambda without
    # any.
    hook = lambda dtype, bucket: _compress(dtype, bucket)  # noqa: E731, PLW0108
    match config.gradient_compression:
        case "none":
            pass
        case "bf16":
            wrapped.register_comm_hook(torch.bfloat16, hook)
        case "fp16":
            wrapped.register_comm_hook(torch.float16, hook)
        case _:
            assert_never(config.gradient_compression)
    timed: Any = wrapped  # torch leaves its timing methods untyped
    timed._set_ddp_runtime_logging_sample_rate(comm_sample_every)
    return wrapped


def _compress(dtype: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    # The mean of a bucket, sent in a narrower dtype; torch's own bf16 hook refuses gloo.
    gradients = bucket.buffer()
    # Divided before the sum: a sum of fp16 gradients of all ranks could overflow.
    narrow = gradients.div(dist.get_world_size()).to(dtype)
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None
    result: torch.futures.Future[Tensor] = work.get_future().then(
        lambda done: gradients.copy_(done.value()[0])
    )
    return result

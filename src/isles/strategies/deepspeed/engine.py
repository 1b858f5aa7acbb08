"""DeepSpeed ZeRO engine: parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty
from torch.optim import Optimizer

from isles.config.interop.deepspeed import Json, missing_deepspeed, stage_of
from isles.dist.batch import Batch
from isles.dist.world import World
from isles.errors import PreflightError, UserError
from isles.strategies.base import Engine
from isles.strategies.deepspeed.state import ZeroState
from isles.strategies.objective import CausalLM, MakeObjective
from isles.strategies.routers import places_read
from isles.strategies.sequence import whole
from isles.strategies.stepper import StepGuard


class DeepSpeedEngine(Engine):
    """ZeRO stage 1, 2 or 3. See `strategies.base.Engine`.

    Under mixed precision the parameters are bf16 or fp16, and each rank keeps its shard of them in
    fp32; the optimizer steps this shard, and checkpoints contain it. Stage 1 reduces gradients once
    per step; stages 2 and 3 reduce in every micro-step, so they keep only a shard of the gradients.

    Args:
        model: on this rank's device, with the same weights on every rank; for stage 3 on the meta
            device.
        settings: DeepSpeed's JSON, without `auto` values.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        UserError, PreflightError: DeepSpeed does not support the settings on this machine.
    """

    replicas = (0, 1)

    def __init__(
        self,
        model: nn.Module,
        materialize: Callable[[nn.Module], None],
        make_optimizers: Callable[[nn.Module], Sequence[Optimizer]],
        world: World,
        *,
        settings: Json,
        make_objective: MakeObjective = CausalLM,
    ) -> None:
        _check_settings(settings, world)
        deepspeed = import_deepspeed(world)
        _check_device(deepspeed, settings, world)
        self.model = model
        self._world_size = world.world_size
        self._device = world.device
        # No bucket larger than the model's gradients: DeepSpeed allocates it in full at the start.
        zero = dict(settings["zero_optimization"])
        total = sum(p.numel() for p in model.parameters())
        zero["reduce_bucket_size"] = min(int(zero["reduce_bucket_size"]), total)
        settings = {**settings, "zero_optimization": zero}

        def make_optimizer(module: nn.Module) -> Optimizer:
            optimizers = make_optimizers(module)
            assert len(optimizers) == 1, "rules keep muon, which needs whole matrices, away"
            return optimizers[0]

        if stage_of(settings) == 3:
            optimizer = _cut_model(deepspeed, model, materialize, make_optimizer, settings, world)
        else:
            optimizer = make_optimizer(model)
        # DeepSpeed warns here about deliberate choices of isles, and prints memory readings.
        with _quiet("DeepSpeed", keep=logging.ERROR), contextlib.redirect_stdout(io.StringIO()):
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=settings, dist_init_required=False
            )
        self._zero: Any = self._engine.optimizer
        self._guard = StepGuard(world.device)
        self._scaler = self._take_scaler()
        self._state = ZeroState(model, self._zero, optimizer, world)
        self._objective = make_objective(model)

    def forward_backward(self, batch: Batch, *, loss_divisor: int, is_last: bool) -> Tensor:
        self._engine.set_gradient_accumulation_boundary(is_last)
        if self.routers is not None:
            scale = 1.0 if self._scaler is None else float(self._scaler.cur_scale)
            self.routers.begin(places_read(batch, None), self._world_size * scale)
        loss_sum = self._loss_sum(self._engine, batch)
        if self._scaler is not None:
            self._guard.watch(loss_sum)
            # isles updates the scale itself: see `_take_scaler`.
            self._zero.override_loss_scale(self._scaler.cur_scale)
        # DeepSpeed averages over ranks, but we need the global sum over global tokens. After a
        # value
        # that is not finite, a NaN makes it skip the step and drop the gradients.
        loss = self._guard.spoil(loss_sum * (self._world_size / loss_divisor))
        self._engine.backward(loss, scale_wrt_gas=False)
        return loss_sum.detach()

    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        self._zero.clip_grad = max_norm or 0.0
        for group in self._zero.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        norm = torch.as_tensor(
            self._zero._global_grad_norm, dtype=torch.float32, device=self._device
        )
        if self._scaler is None:
            self._guard.watch(norm)
        else:
            self._guard.agree()
            if self._zero.overflow and self._scaler.cur_scale <= self._scaler.min_scale:
                self._guard.watch(norm)  # the scale is at its minimum: no gradient is ever finite
            self._scaler.update_scale(bool(self._zero.overflow))
        self._guard.count()
        if self.routers is not None:
            self.routers.end_step(self._guard.poison)
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        return self._loss_sum(self.model, batch)

    @torch.no_grad()
    def row_scores(self, batch: Batch) -> Tensor:
        return self._objective.row_scores(self.model, whole(batch, self.model))

    def take_figures(self, *, of_training: bool) -> Mapping[str, Tensor]:
        return self._objective.take_figures(of_training=of_training)

    def good_steps(self) -> int | None:
        return self._guard.good_steps()

    def trainable(self) -> list[nn.Parameter]:
        # This rank's fp32 shards; each holds many flattened parameters.
        return self._state.parts()

    def state_dict(self) -> dict[str, Any]:
        # Each tensor is whole on the one rank that it is assigned to.
        state: dict[str, Any] = self._state.collect()
        if self._scaler is not None and self._state.is_main:
            growth = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
            growth %= self._scaler.scale_window  # as in torch's scaler
            state["scaler.scale"] = torch.tensor(self._scaler.cur_scale, dtype=torch.float64)
            state["scaler.growth"] = torch.tensor(growth)
        if self.routers is not None and self._state.is_main:
            state |= self.routers.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.spread(state)
        if self._scaler is not None:
            scale = self._state.share(state.get("scaler.scale"), torch.float64)
            growth = self._state.share(state.get("scaler.growth"), torch.int64)
            self._scaler.cur_scale = float(scale)
            self._scaler.cur_iter = int(growth)
            self._scaler.last_overflow_iter = -1
        if self.routers is not None:
            self.routers.load_state_dict(state)

    def trained_shapes(self) -> Mapping[str, torch.Size]:
        return self._state.trained_shapes()

    def whole_weight(self, name: str) -> Tensor:
        return self._state.whole_weight(name)

    def set_whole_weight(self, name: str, value: Tensor) -> None:
        self._state.set_whole_weight(name, value)

    def weights_set(self) -> None:
        self._state.push()

    def _take_scaler(self) -> Any:
        # DeepSpeed's loss scaler; None outside fp16. We update it ourselves: DeepSpeed would raise
        # the scale between measuring a gradient and dividing the gradient by the scale, which
        # halves such a step.
        if not hasattr(self._zero, "loss_scaler"):
            return None
        scaler, self._zero.loss_scaler = self._zero.loss_scaler, _NoScaler()
        if self._zero.dtype != torch.float16:
            return None
        scaler.raise_error_at_min_scale = False
        return scaler

    def _loss_sum(self, model: Any, batch: Batch) -> Tensor:
        return self._objective.loss_sum(model, whole(batch, self.model))


class _NoScaler:
    """Replaces DeepSpeed's loss scaler; `override_loss_scale` sets the scale."""

    cur_scale = 1.0
    dynamic = False

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def update_scale(self, overflow: bool) -> None:
        pass


def import_deepspeed(world: World) -> Any:  # an untyped library
    """Import deepspeed, set up for this rank's kind of device.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if error := missing_deepspeed():
        raise error
    # DeepSpeed reads both from the environment, and would otherwise guess the kind of device.
    os.environ["DS_ACCELERATOR"] = world.device.type
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    with _quiet("torchao"):  # it reports each CUDA library that it cannot load
        import deepspeed
        import deepspeed.ops

    # Warnings about DeepSpeed's own calls; each calling line would warn once.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning
    )
    # Avoids compiling a shared-memory all-reduce for CPUs at the start; gloo exists already.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _check_settings(settings: Json, world: World) -> None:
    # Checks that every rank has read the same file. All ranks must call this.
    mine = json.dumps(settings, sort_keys=True)
    for rank, host, theirs in world.gather((world.rank, world.host, mine)):
        if theirs != mine:
            raise UserError(
                f"the DeepSpeed file of rank {rank} differs from that of rank {world.rank}",
                where=f"strategy.config_file on host {host}",
                fix="copy the same file to every host",
            )


def _check_device(deepspeed: Any, settings: Json, world: World) -> None:
    # Refuse settings that this machine does not support, before DeepSpeed fails on them later.
    accelerator = deepspeed.accelerator.get_accelerator()
    where = f"rank {world.rank} on {world.host}"
    for name, is_supported in (
        ("bf16", accelerator.is_bf16_supported),
        ("fp16", accelerator.is_fp16_supported),
    ):
        if settings.get(name, {}).get("enabled") and not is_supported():
            raise PreflightError(
                f"DeepSpeed cannot compute in {name} on this {world.device.type}",
                where=where,
                fix="use another training.precision; 32-true works everywhere",
                id="strategy.deepspeed",
            )
    zero = settings["zero_optimization"]
    offloads = [zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")]
    if "nvme" in offloads and not deepspeed.ops.__compatible_ops__["async_io"]:
        raise PreflightError(
            "offloading to nvme needs DeepSpeed's async_io, which cannot be built on this host",
            where=where,
            fix="install libaio (Debian: libaio-dev) and a C++ compiler (see `ds_report`), or "
            "offload to cpu",
            id="strategy.deepspeed",
        )


def _cut_model(
    deepspeed: Any,
    model: nn.Module,
    materialize: Callable[[nn.Module], None],
    make_optimizer: Callable[[nn.Module], Optimizer],
    settings: Json,
    world: World,
) -> Optimizer:
    # Fills an empty model and passes it to DeepSpeed, tensor by tensor; returns the optimizer over
    # its parameters. Every rank first fills its shard of each tensor in CPU memory. Then one tensor
    # at a time is gathered, and sharded again by DeepSpeed. All ranks must call this.
    _allocate(model, init_device_mesh("cpu", (world.world_size,)))
    materialize(model)
    # Made now, while the parameters have their full shapes: it groups parameters by shape.
    optimizer = make_optimizer(model)
    init = deepspeed.zero.Init(config_dict_or_path=settings)
    dtype = _compute_dtype(settings)
    # By index from here on, so that no reference keeps a shard alive that DeepSpeed has replaced.
    number = {p: n for n, p in enumerate(model.parameters())}
    grouped = [[number[p] for p in group["params"]] for group in optimizer.param_groups]
    places = [(module, key, number[p]) for module, key, p in _parameters(model)]
    del number
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    taken: dict[int, nn.Parameter] = {}
    for module, key, index in places:
        # Tied weights are in several modules, but are converted once.
        if index not in taken:
            taken[index] = _whole(module._parameters[key], world.device, dtype)
            init._convert_to_zero_parameters([taken[index]])
        module._parameters[key] = taken[index]
    for group, indices in zip(optimizer.param_groups, grouped, strict=True):
        group["params"] = [taken[index] for index in indices]
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(world.device)
    return optimizer


def _whole(
    parameter: nn.Parameter | None, device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    assert parameter is not None and isinstance(parameter.data, DTensor)
    whole = parameter.data.full_tensor().to(device, dtype)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _allocate(model: nn.Module, mesh: DeviceMesh) -> None:
    # Memory for this rank's shard of every parameter, and for all buffers.
    cut: dict[nn.Parameter, nn.Parameter] = {}
    for module, key, parameter in list(_parameters(model)):
        if parameter not in cut:
            part = empty(
                *parameter.shape, dtype=parameter.dtype, device_mesh=mesh, placements=[Shard(0)]
            )
            cut[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module._parameters[key] = cut[parameter]
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield module, key, parameter


def _compute_dtype(settings: Json) -> torch.dtype:
    if settings.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if settings.get("fp16", {}).get("enabled") else torch.float32


@contextlib.contextmanager
def _quiet(name: str, keep: int = logging.CRITICAL) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(keep)
    try:
        yield
    finally:
        logger.setLevel(before)

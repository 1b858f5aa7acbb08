"""The whole model on every rank; gradients are averaged by DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from isles.dist.batch import IGNORE_INDEX, Batch
from isles.dist.world import World
from isles.strategies.guard import StepGuard

_LEAST_SCALE = 2.0**-14
"""Below this the loss itself is lost in fp16; a scaler comes here when every step overflows."""

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class DDPEngine:
    """One process, or several that hold the same model. See `strategies.base.Engine`.

    Args:
        model: on this rank's device, the same weights on every rank.
        make_optimizers: optimizers over the parameters of the model that it is given.
        world: the ranks of the cluster.
        precision: 32-true, bf16-mixed, fp16-mixed or bf16-true, as in the run file.
        comm_sample_every: how often, in steps, communication is timed.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizers: Callable[[nn.Module], Sequence[Optimizer]],
        world: World,
        *,
        precision: str,
        comm_sample_every: int,
    ) -> None:
        self.model = model
        self._world_size = world.world_size
        self._device = world.device
        self.replicas = (world.rank, world.world_size)
        self._optimizers = list(make_optimizers(model))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._autocast = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision)
        self._scaler = (
            torch.amp.GradScaler(world.device.type) if precision == "fp16-mixed" else None
        )
        self._guard = StepGuard(world.device)
        self._ddp: DistributedDataParallel | None = None
        self._forward: nn.Module = model
        if world.world_size > 1:
            self._ddp = DistributedDataParallel(
                model,
                device_ids=[world.device.index] if world.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # they are constants, and the same everywhere
            )
            timed: Any = self._ddp  # torch leaves its timing methods untyped
            timed._set_ddp_runtime_logging_sample_rate(comm_sample_every)
            self._forward = self._ddp

    def forward_backward(self, batch: Batch, *, global_tokens: int, is_last: bool) -> Tensor:
        """See Engine. Gradients travel only in the last micro-batch."""
        quiet = self._ddp is not None and not is_last
        with self._ddp.no_sync() if quiet and self._ddp else contextlib.nullcontext():
            loss_sum = self._loss_sum(self._forward, batch)
            # DDP averages over ranks; the global sum over global tokens is wanted.
            loss = loss_sum * (self._world_size / global_tokens)
            if self._scaler is not None:
                self._guard.watch(loss_sum)
                loss = self._scaler.scale(self._guard.spoil(loss))
            loss.backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach()

    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        """See Engine."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            if self._scaler is not None:
                self._scaler.unscale_(optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients).float()
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        if self._scaler is not None:
            self._guard.agree()
            for optimizer in self._optimizers:
                self._scaler.step(optimizer)
            self._scaler.update()
            self._watch_scale(self._scaler)
        else:
            self._guard.watch(norm)
            for optimizer in self._optimizers:
                self._guard.step(optimizer)
        self._guard.count()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=self._ddp is None)
        return norm

    def evaluate(self, batch: Batch) -> Tensor:
        """See Engine."""
        with torch.no_grad():
            return self._loss_sum(self.model, batch)

    def good_steps(self) -> int | None:
        """See Engine."""
        return self._guard.good_steps()

    def communication_s(self) -> float | None:
        """See Engine: the part of DDP's all-reduce that no computation hid."""
        if self._ddp is None:
            return 0.0
        timed: Any = self._ddp
        timing = timed._get_ddp_logging_data()
        if "backward_comm_time" not in timing:
            return None
        hidden = timing.get("backward_compute_comm_overlap_time", 0)
        return max(0, int(timing["backward_comm_time"]) - int(hidden)) / 1e9

    def trainable(self) -> list[nn.Parameter]:
        """See Engine."""
        return self._parameters

    def state_dict(self) -> dict[str, Any]:
        """See Engine. Keys: model.NAME, optimizer.state.NAME.FIELD, scaler.scale."""
        state: dict[str, Any] = {}
        for name, value in get_model_state_dict(self.model).items():
            state[f"model.{name}"] = value
        # Flattened, it is one flat dict, which torch's own annotation does not say.
        optimizer: dict[str, Any] = get_optimizer_state_dict(
            self.model, self._optimizers, options=_FLAT
        )
        for name, field in optimizer.items():
            if isinstance(field, Tensor):  # hyperparameters come from the run file
                state[f"optimizer.{name}"] = field
        if self._scaler is not None:
            scale = self._scaler.state_dict()
            state["scaler.scale"] = torch.tensor(scale["scale"], dtype=torch.float64)
            state["scaler.growth"] = torch.tensor(scale["_growth_tracker"])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Engine."""
        model = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
        set_model_state_dict(self.model, model)
        optimizer = get_optimizer_state_dict(self.model, self._optimizers, options=_FLAT)
        for name in optimizer:
            if (key := f"optimizer.{name}") in state:
                optimizer[name] = state[key]
        set_optimizer_state_dict(self.model, self._optimizers, optimizer, options=_FLAT)
        if self._scaler is not None and "scaler.scale" in state:
            restored = self._scaler.state_dict()
            restored["scale"] = float(state["scaler.scale"])
            restored["_growth_tracker"] = int(state["scaler.growth"])
            self._scaler.load_state_dict(restored)

    def _watch_scale(self, scaler: torch.amp.GradScaler) -> None:
        """A scale that has fallen to nothing means that no gradient is ever finite."""
        scale: Tensor | None = scaler._scale
        if scale is not None:
            self._guard.watch(1.0 / (scale >= _LEAST_SCALE).float())

    def _loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(
            self._device.type, dtype=self._autocast, enabled=self._autocast is not None
        ):
            logits_BTV = model(input_ids=batch.input_ids_BT, use_cache=False).logits
        return F.cross_entropy(
            logits_BTV.float().flatten(0, 1),
            batch.targets_BT.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )

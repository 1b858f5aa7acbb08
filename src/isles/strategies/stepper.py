"""The optimizer step that all engines on plain PyTorch share: norm, clipping, guard, state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from isles.strategies.guard import StepGuard
from isles.strategies.scaler import LossScaler

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

_PARTLY = StateDictOptions(strict=False)

MakeOptimizers = Callable[[nn.Module], Sequence[Optimizer]]


class Stepper:
    """Optimizers over one or more modules whose parameters are whole or sharded (DTensors).

    Args:
        modules: a whole model, or the stages of it that this rank holds.
        make_optimizers: the optimizers over the parameters of one module.
        device: where this rank computes.
        precision: 32-true, bf16-mixed, fp16-mixed or bf16-true, as in the run file.
        stages: the ranks that hold the other stages of the same model, over which the norm is
            taken too; None where each rank has all.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        make_optimizers: MakeOptimizers,
        *,
        device: torch.device,
        precision: str,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        self._modules = tuple(modules)
        self._optimizers = [list(make_optimizers(module)) for module in modules]
        self._device = device
        self._stages = stages
        self.parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
        self._guard = StepGuard(device)
        self._scaler = LossScaler(device) if precision == "fp16-mixed" else None

    def scaled(self, loss: Tensor, loss_sum: Tensor) -> Tensor:
        """The loss to call backward on; under fp16 it is watched and scaled.

        Args:
            loss: what is wanted.
            loss_sum: the same before any scale.
        """
        if self._scaler is None:
            return loss
        self._guard.watch(loss_sum)
        return self._scaler.scale(loss)

    def step(self, *, lr: float, max_norm: float | None, keep_gradients: bool = False) -> Tensor:
        """Clip, step and clear the gradients; see Engine.optimizer_step. All ranks must call this.

        Args:
            keep_gradients: zero the gradients in place, where others hold views of them.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = self._total_norm(gradients)
        overflow = None
        if self._scaler is not None:
            norm = self._scaler.unscale(gradients, norm)
            overflow = (~torch.isfinite(norm)).float()
            self._guard.agree()
        else:
            self._guard.watch(norm)
        if max_norm is not None:
            for parameters in _by_mesh(self.parameters):
                nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        for optimizer in self._each_optimizer():
            for group in optimizer.param_groups:
                group["lr"] = lr
            self._guard.step(optimizer, skip=overflow)
        if self._scaler is not None and overflow is not None:
            self._scaler.update(overflow)
            self._guard.watch(self._scaler.health())
        self._guard.count()
        for optimizer in self._each_optimizer():
            optimizer.zero_grad(set_to_none=not keep_gradients)
        return norm

    def good_steps(self) -> int | None:
        """See Engine.good_steps."""
        return self._guard.good_steps()

    def state_dict(self) -> dict[str, Any]:
        """Keys: model.NAME, optimizer.state.NAME.FIELD, scaler.scale and scaler.growth."""
        state: dict[str, Any] = {}
        for module, optimizers in zip(self._modules, self._optimizers, strict=True):
            for name, value in _kept(module).items():
                state[f"model.{name}"] = value
            # Flattened, it is one flat dict, which torch's own annotation does not say.
            fields: dict[str, Any] = get_optimizer_state_dict(module, optimizers, options=_FLAT)
            for name, field in fields.items():
                if isinstance(field, Tensor):  # hyperparameters come from the run file
                    state[f"optimizer.{name}"] = field
        if self._scaler is not None:
            state |= {f"scaler.{name}": v for name, v in self._scaler.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for module, optimizers in zip(self._modules, self._optimizers, strict=True):
            known = {name: state[f"model.{name}"] for name in _kept(module)}
            set_model_state_dict(module, known, options=_PARTLY)
            # torch makes no fresh state to load into while there are gradients.
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            fields = get_optimizer_state_dict(module, optimizers, options=_FLAT)
            for name in fields:
                if (key := f"optimizer.{name}") in state:
                    fields[name] = state[key]
            set_optimizer_state_dict(module, optimizers, fields, options=_FLAT)
        if self._scaler is not None and "scaler.scale" in state:
            self._scaler.load_state_dict(
                {"scale": state["scaler.scale"], "growth": state["scaler.growth"]}
            )

    def _each_optimizer(self) -> Iterator[Optimizer]:
        for optimizers in self._optimizers:
            yield from optimizers

    def _total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norms = [nn.utils.get_total_norm(group) for group in _by_mesh(gradients)]
        whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        if len(whole) == 1 and self._stages is None:
            return whole[0].float().to(self._device)
        squares = torch.zeros((), device=self._device)
        for norm in whole:
            squares += norm.float().to(self._device) ** 2
        if self._stages is not None:
            dist.all_reduce(squares, group=self._stages)
        return squares.sqrt()


def _kept(module: nn.Module) -> dict[str, Any]:
    """What belongs into a checkpoint: all, or beside frozen weights what is trained."""
    state = get_model_state_dict(module)
    if all(p.requires_grad for p in module.parameters()):
        return state
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def _by_mesh(tensors: Sequence[Any]) -> list[list[Any]]:
    """Tensors in groups that one operation may take together: of the same device mesh."""
    groups: dict[DeviceMesh | None, list[Any]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return list(groups.values())

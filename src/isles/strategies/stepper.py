"""Optimizer step of all engines on plain PyTorch: norm, clipping, guard, loss scale."""

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
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

_PARTLY = StateDictOptions(strict=False)

MakeOptimizers = Callable[[nn.Module], Sequence[Optimizer]]

_START = 2.0**16
_LEAST = 2.0**-14
"""Below this scale the loss itself underflows in fp16; reached when every step overflows."""

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000


class Stepper:
    """Optimizers over one or more modules whose parameters are whole or sharded (DTensors).

    Args:
        modules: a whole model, or this rank's stages of it.
        make_optimizers: makes the optimizers over the parameters of one module.
        precision: 32-true, bf16-mixed, fp16-mixed or bf16-true, as in the run file.
        stages: group of the ranks with the other stages of the same model, included in the norm;
            None
            if each rank has all stages.
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
        """The loss for `backward`; under fp16 it is also watched and scaled.

        Args:
            loss: the loss of the micro-batch.
            loss_sum: the same loss, before any scaling.
        """
        if self._scaler is None:
            return loss
        self._guard.watch(loss_sum)
        return self._scaler.scale(loss)

    def step(self, *, lr: float, max_norm: float | None, keep_gradients: bool = False) -> Tensor:
        """Clip, step and clear the gradients; see Engine.optimizer_step. All ranks must call this.

        Args:
            lr: learning rate.
            max_norm: largest norm after clipping; None: no clipping.
            keep_gradients: zero the gradients in place, for engines with views of them.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = self._total_norm(gradients)
        overflow = factor = None
        if self._scaler is not None:
            factor = self._scaler.inverse()
            norm = norm * factor
            overflow = (~torch.isfinite(norm)).float()
            self._guard.agree()
        else:
            self._guard.watch(norm)
        if max_norm is not None:
            clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            factor = clip if factor is None else factor * clip
        if factor is not None:
            _multiply(gradients, factor)
        for optimizer in self._each_optimizer():
            for group in optimizer.param_groups:
                group["lr"] = lr
            self._guard.step(optimizer, skip=overflow)
        if self._scaler is not None and overflow is not None:
            self._scaler.update(overflow)
            self._guard.watch(self._scaler.health())
        self._guard.count()
        for optimizer in self._each_optimizer():
            # None frees the memory of the gradients until the next backward pass.
            optimizer.zero_grad(set_to_none=not keep_gradients)
        return norm

    def good_steps(self) -> int | None:
        return self._guard.good_steps()

    @property
    def loss_scale(self) -> float | Tensor:
        """Factor that `scaled` gives the loss."""
        return 1.0 if self._scaler is None else self._scaler.scale(torch.ones_like(self.poison))

    @property
    def poison(self) -> Tensor:
        """See `StepGuard.poison`."""
        return self._guard.poison

    def state_dict(self) -> dict[str, Any]:
        """Keys: model.NAME, optimizer.state.NAME.FIELD, scaler.scale and scaler.growth."""
        state: dict[str, Any] = {}
        for module, optimizers in zip(self._modules, self._optimizers, strict=True):
            for name, value in _kept(module).items():
                state[f"model.{name}"] = value
            if not optimizers:
                continue  # a pipeline stage without an adapter
            # With flattening it is one flat dict, unlike torch's own annotation.
            fields: dict[str, Any] = get_optimizer_state_dict(module, optimizers, options=_FLAT)
            for name, field in fields.items():
                if isinstance(field, Tensor):  # hyperparameters come from the run file
                    state[f"optimizer.{name}"] = field
        if self._scaler is not None:
            state |= {f"scaler.{name}": v for name, v in self._scaler.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""
        for module, optimizers in zip(self._modules, self._optimizers, strict=True):
            known = {name: state[f"model.{name}"] for name in _kept(module)}
            set_model_state_dict(module, known, options=_PARTLY)
            if not optimizers:
                continue
            # torch creates no fresh state to load into while gradients exist.
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
        whole = [self._norm(group) for group in _alike(gradients)]
        if len(whole) == 1 and self._stages is None:
            return whole[0]
        squares = torch.zeros((), device=self._device)
        for norm in whole:
            squares += norm**2
        if self._stages is not None:
            # Each stage has other parameters, so the squares add up to those of the whole model.
            dist.all_reduce(squares, group=self._stages)
        return squares.sqrt()

    def _norm(self, gradients: Sequence[Any]) -> Tensor:
        # Of gradients with the same mesh and placements. With offload, ranks may hold their parts
        # on different devices, but all must send alike.
        first = gradients[0]
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        norm = nn.utils.get_total_norm(parts).float().to(self._device)
        if not isinstance(first, DTensor):
            return norm
        mesh = first.device_mesh
        cuts = enumerate(first.placements)
        sums = [
            Replicate() if cut.is_replicate() or mesh.size(axis) == 1 else Partial()
            for axis, cut in cuts
        ]
        if Partial() not in sums:
            return norm
        squares = DTensor.from_local(norm**2, mesh, sums, run_check=False).full_tensor()
        whole: Tensor = squares.sqrt()
        return whole


def _kept(module: nn.Module) -> dict[str, Any]:
    # Content of a checkpoint: everything, or with frozen weights only the trained part.
    state = get_model_state_dict(module)
    if all(p.requires_grad for p in module.parameters()):
        return state
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def _alike(tensors: Sequence[Any]) -> list[list[Any]]:
    # Groups of tensors with the same mesh and placements, in the same order on all ranks.
    groups: dict[object, list[Any]] = {}
    for tensor in tensors:
        is_cut = isinstance(tensor, DTensor)
        key = (tensor.device_mesh, tensor.placements) if is_cut else None
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def _multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    # The fused optimizers could divide by a `grad_scale` instead. Their kernels then write the
    # gradients as well, so that saves one read, and they divide in fp64, which is 64 times slower
    # than fp32 on GPUs for home use.
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        # DTensors of one operation are dispatched one by one, on the host.
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        groups.setdefault((part.device, part.dtype), []).append(part)
    for (device, _), parts in groups.items():
        torch._foreach_mul_(parts, factor.to(device))  # offloaded gradients are on the CPU


class StepGuard:
    """Records on the device, without a synchronization, that a value was not finite.

    After that no optimizer step changes anything, so the host may notice steps later and still
    finds the weights of the last good step.
    """

    def __init__(self, device: torch.device) -> None:
        self._poison = torch.zeros((), device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def poison(self) -> Tensor:
        """1.0 after a value that was not finite, else 0.0; on the device."""
        return self._poison

    def watch(self, value: Tensor) -> None:
        """Record whether a loss or norm is finite."""
        torch.maximum(self._poison, (~torch.isfinite(value.detach())).float(), out=self._poison)

    def agree(self) -> None:
        """Poison all ranks if one is poisoned. All ranks must call this.

        Needed only if gradients that are not finite do not reach the other ranks (a loss scaler
        drops them).
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._poison, op=dist.ReduceOp.MAX)

    def spoil(self, loss: Tensor) -> Tensor:
        """The loss; once poisoned, NaN with NaN gradients, so that DeepSpeed skips the step."""
        # A product: torch.where gives unselected values a gradient of zero, which moves the
        # weights.
        return loss * torch.where(self._poison > 0, torch.nan, 1.0)

    def step(self, optimizer: Optimizer, *, skip: Tensor | None = None) -> None:
        """Step an optimizer unless poisoned, or unless `skip` is 1.0 for this step.

        Args:
            optimizer: a fused optimizer of torch or an optimizer of `train/optimizer/`. Both skip
                by `found_inf`, as a loss scaler uses it, without a synchronization.
        """
        stops = self._poison if skip is None else torch.maximum(self._poison, skip)
        # For offloaded parameters, torch would read its copy before it has arrived.
        # It copies a flag of the CPU to other devices by itself.
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        where = min(devices, key=lambda device: device.type != "cpu")
        optimizer.found_inf = stops.to(where)  # type: ignore[attr-defined]
        optimizer.step()

    def count(self) -> None:
        """Count a completed optimizer step."""
        self._good += (self._poison == 0).long()

    def good_steps(self) -> int | None:
        """Number of good steps before the first bad step; None if all are good. Waits for the
        device."""
        return int(self._good.item()) if self._poison.item() else None


class LossScaler:
    """One scale for all optimizers and ranks, derived from the global gradient norm.

    Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2, with the constants of
    torch.amp.GradScaler.
    """

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.full((), _START, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, scaled so that gradients are large enough for fp16."""
        return loss * self._scale

    def inverse(self) -> Tensor:
        """Factor that gradients and their norm need."""
        return 1.0 / self._scale

    def update(self, overflow: Tensor) -> None:
        """Update the scale; `overflow`: 1.0 if this step's norm was not finite."""
        torch._amp_update_scale_(self._scale, self._growth, overflow, _GROWTH, _BACKOFF, _INTERVAL)

    def health(self) -> Tensor:
        """Finite while the scale is usable, infinite after it has underflowed."""
        return 1.0 / (self._scale >= _LEAST).float()

    def state_dict(self) -> dict[str, Tensor]:
        """`scale` (fp64) and `growth` (int32), on the CPU."""
        return {"scale": self._scale.double().cpu(), "growth": self._growth.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state from `state_dict`."""
        self._scale.copy_(state["scale"])
        self._growth.copy_(state["growth"])

"""AdamW for small memories: 8-bit moments, stochastically rounded bf16 weights, or both."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchao.optim.quant_utils import (
    _fp32_to_bf16_sr,
    dequant_with_qmap,
    quantize_8bit_with_qmap,
    scale_tensor,
)
from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

from isles.train.optimizer.shards import found_inf, local

_LEAST_NUMEL = 4096
"""Smaller tensors keep fp32 moments: they use little memory, and norms are sensitive to noise."""

_LONGEST_BLOCK, _SHORTEST_BLOCK = 256, 32
"""Numbers that share one scale. Smaller blocks would spend the saved memory on scales."""

_GPU_STACK, _CPU_STACK = 2**24, 2**16
"""Numbers of small parameters that are stepped together. A GPU needs about as much time for 2**24
numbers as the host needs for a launch; 2**16 numbers stay in the cache of a CPU. Larger parameters
are stepped one by one, without a copy."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


class LowMemoryAdamW(Optimizer):
    """AdamW on this rank's part of each parameter, with torchao's 8-bit moments, its stochastically
    rounded bf16 weights, or both.

    Blocks of codes lie within rows, so codes and scales are sharded like the matrix, and any number
    of ranks can load a checkpoint bit for bit. Random numbers depend on the seed, the step and the
    place of the shard. Ranks with the same weights therefore round them alike, and a resumed run
    rounds like an uninterrupted run.

    Args:
        groups: parameters with their `weight_decay`, whole or sharded (DTensors).
        eight_bit: hold the moments of matrices in 8 bits, other moments in fp32.
        rounds_at_random: round bf16 weights stochastically. Without eight_bit, moments have the
            weights' type.
        seed: of the random numbers; the same on all ranks.

    Source: Dettmers et al. 2022 (arXiv:2110.02861) for the 8-bit type and its blocks; Gupta et al.
    2015 (arXiv:1502.02551) for the rounding; torchao/optim/adam.py.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        eight_bit: bool,
        rounds_at_random: bool,
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._rounds_at_random = rounds_at_random
        self._seed = seed
        # Steps that were asked for. The device alone knows how many of them were skipped, and the
        # host needs a number for the seed.
        self._count = 0
        plain_dtype = torch.float32 if eight_bit or not rounds_at_random else None
        for group in self.param_groups:
            for parameter in group["params"]:
                block = _block_length(parameter) if eight_bit else None
                step = torch.zeros((), device=local(parameter.data).device)
                # Created at the start, so that a checkpoint before the first step includes it.
                state = self.state[parameter] = {"step": step}
                for moment in _MOMENTS:
                    state |= _zero_moment(moment, parameter, block, plain_dtype)
        self._device = local(self.param_groups[0]["params"][0].data).device
        signed, unsigned = get_qmap_signed(), get_qmap_unsigned()
        self._qmaps = [torch.tensor(qmap, device=self._device) for qmap in (signed, unsigned)]
        # Compiled, a step never holds fp32 copies of a matrix; a CPU may have no compiler.
        self._adamw: Callable[..., None] = adamw_step
        if self._device.type == "cuda":
            self._adamw = torch.compile(adamw_step, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient, unless `found_inf` is 1.0."""
        assert closure is None, "isles evaluates a loss once a step"
        flag = found_inf(self)
        stops = torch.zeros((), device=self._device) if flag is None else flag
        devices = [self._device] if self._device.type == "cuda" else []
        place = 0
        with (
            # The compiler's cache has one entry for each shape.
            torch._dynamo.utils.disable_cache_limit() if devices else contextlib.nullcontext(),
            torch.random.fork_rng(devices=devices, enabled=self._rounds_at_random),
        ):
            for group in self.param_groups:
                stepped = [p for p in group["params"] if p.grad is not None]
                if stepped:
                    steps = [self.state[p]["step"] for p in stepped]
                    # torch would read a single tensor back as a number.
                    torch._foreach_add_(steps, [1 - stops] * len(steps))
                lr = torch.full((), group["lr"], device=self._device)
                for parameters in self._stacks(stepped):
                    self._step_stack(parameters, group, lr, stops, place)
                    place += 1
        self._count += 1

    def _stacks(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        # Parameters of the same shape, type and placement, together if they are small.
        alike: dict[Any, list[nn.Parameter]] = {}
        for p in parameters:
            part, moment = local(p.data), local(self.state[p]["exp_avg"])
            if part.numel():  # a rank may have no rows of a matrix
                key = (part.shape, part.dtype, moment.dtype, _shard(p))
                alike.setdefault(key, []).append(p)
        for same in alike.values():
            most = _GPU_STACK if self._device.type == "cuda" else _CPU_STACK
            size = max(most // local(same[0].data).numel(), 1)
            for start in range(0, len(same), size):
                yield same[start : start + size]

    def _step_stack(
        self,
        parameters: Sequence[nn.Parameter],
        group: dict[str, Any],
        lr: Tensor,
        stops: Tensor,
        place: int,
    ) -> None:
        if self._rounds_at_random:
            text = f"{self._seed} {self._count} {place} {_shard(parameters[0])}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        states = [self.state[p] for p in parameters]
        fields = [name for name in states[0] if name != "step"]
        kept = [[local(p.detach()) for p in parameters]]
        kept += [[local(state[name]) for state in states] for name in fields]
        # A view of one tensor, a copy of several.
        is_one = len(parameters) == 1
        stacked = [some[0][None] if is_one else torch.stack(some) for some in kept]
        weights, moments = stacked[0], dict(zip(fields, stacked[1:], strict=True))
        gradients = [local(p.grad) for p in parameters]
        self._adamw(
            weights,
            gradients[0][None] if is_one else torch.stack(gradients),
            # One number for each parameter of the stack.
            torch.stack([s["step"] for s in states]).view(-1, *[1] * (weights.ndim - 1)),
            [(moments[name], moments.get(f"{name}_scale")) for name in _MOMENTS],
            self._qmaps,
            lr,
            stops,
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            rounds_at_random=self._rounds_at_random and weights.dtype == torch.bfloat16,
        )
        if not is_one:
            for old, new in zip(kept, stacked, strict=True):
                torch._foreach_copy_(old, new.unbind())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments in place, bit for bit; torch's own method would turn codes into floats.

        Hyperparameters stay: they come from the run file.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"][key].items():
                    local(self.state[parameter][name]).copy_(local(value))
        self._count = int(max(state["step"].item() for state in self.state.values()))


def adamw_step(
    weights: Tensor,
    gradients: Tensor,
    steps: Tensor,
    moments: Sequence[tuple[Tensor, Tensor | None]],
    qmaps: Sequence[Tensor],
    lr: Tensor,
    stops: Tensor,
    *,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    rounds_at_random: bool,
) -> None:
    """AdamW's step of some parameters of one shape, in fp32 and in place.

    Args:
        steps: of each parameter, including this step; of as many dimensions as the weights.
        moments: numbers and None, or codes and the scale of each block.
        qmaps: numbers of the codes, for each moment.
        stops: 1.0 if nothing may change, else 0.0.
    """
    keeps = stops != 0
    gradient = gradients.float()
    found = []
    for (values, scale), qmap, beta, new in zip(
        moments, qmaps, betas, (gradient, gradient.square()), strict=True
    ):
        old = values.float() if scale is None else dequant_with_qmap(values, qmap, scale.view(-1))
        moment = old.lerp(new, 1 - beta)
        found.append(moment)
        # Selected, because a product of NaN and 0 is NaN.
        if scale is None:
            values.copy_(torch.where(keeps, values, moment.to(values.dtype)))
        else:
            scaled, scales = scale_tensor(moment, values.numel() // scale.numel())
            codes = quantize_8bit_with_qmap(scaled, qmap)
            values.copy_(torch.where(keeps, values, codes))
            scale.copy_(torch.where(keeps, scale, scales.view(scale.shape)))
    first, second = found
    corrections = [1 - beta**steps for beta in betas]
    size = (second.sqrt() / corrections[1].sqrt()) + eps
    moved = weights.float()
    moved = moved - lr * weight_decay * moved
    moved = moved - lr * (first / corrections[0]) / size
    rounded = _fp32_to_bf16_sr(moved) if rounds_at_random else moved.to(weights.dtype)
    weights.copy_(torch.where(keeps, weights, rounded))


def _shard(parameter: nn.Parameter) -> tuple[int, ...]:
    # This rank's place among the shards of a parameter; the same for its copies.
    data: Any = parameter.data
    if not isinstance(data, DTensor):
        return ()
    where = data.device_mesh.get_coordinate() or ()
    cuts = zip(where, data.placements, strict=True)
    return tuple(index for index, placement in cuts if placement.is_shard())


def _block_length(parameter: nn.Parameter) -> int | None:
    # Numbers of a row that share a scale; None: this tensor keeps plain moments. The result depends
    # only on values that are equal on all ranks, so that ranks have the same kinds of state.
    if parameter.ndim < 2 or parameter.numel() < _LEAST_NUMEL:
        return None
    width = local(parameter.data).shape[-1]
    block = min(_LONGEST_BLOCK, width & -width)
    return block if block >= _SHORTEST_BLOCK else None


def _zero_moment(
    name: str, parameter: nn.Parameter, block: int | None, plain_dtype: torch.dtype | None
) -> dict[str, Tensor]:
    # A moment in checkpoint form: numbers, or codes and a scale per block.
    if block is None:
        return {name: torch.zeros_like(parameter.data, dtype=plain_dtype)}
    codes = torch.zeros_like(parameter.data, dtype=torch.uint8)
    part = local(codes)
    scale = torch.zeros((*part.shape[:-1], part.shape[-1] // block), device=part.device)
    if isinstance(codes, DTensor):
        shape = torch.Size((*codes.shape[:-1], codes.shape[-1] // block))
        scale = DTensor.from_local(
            scale,
            codes.device_mesh,
            codes.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        ).to(part.device)  # from_local moves offloaded ones to the GPU
    return {name: codes, f"{name}_scale": scale}

"""AdamW for small memories: its state in 8 bits, or bf16 weights that are rounded at random."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_LEAST_NUMEL = 4096
"""Tensors below this keep fp32 state: they are nothing in sum, and norms mind the noise most."""

_LONGEST_BLOCK, _SHORTEST_BLOCK = 256, 32
"""Numbers that share one scale; with fewer the scales would eat what the codes save."""

_CHUNK = 1 << 24
"""Numbers that are worked on at a time, so that fp32 copies never need much memory."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


class SmallAdamW(Optimizer):
    """AdamW that holds two bytes a weight instead of eight, or rounds bf16 at random, or both.

    In 8 bits, each block of a row has one fp32 scale, and a number is the nearest of 256 values
    that lie densest at zero. Blocks lie within rows, so they do not depend on how many ranks share
    a matrix, and a checkpoint is taken over by any number of them, bit for bit.

    Where weights are rounded at random, they go up or down with the probability that makes the
    mean right. The random numbers follow from the seed, the step and the place of the shard: all
    ranks that hold the same shard round alike, and a resumed run rounds as it would have.

    As torch's fused optimizers do, it changes nothing in a step where `found_inf` is 1, and does
    not wait for the device to know it.

    Args:
        groups: parameters with their `weight_decay`, whole or sharded (DTensors).
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: offset of the denominator.
        eight_bit: hold the moments of matrices in 8 bits; other moments in fp32.
        rounds_at_random: round weights in bf16 stochastically, and with eight_bit off also the
            moments, which then are bf16.
        seed: of the random numbers.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101) for AdamW; Dettmers et al. 2022
    (arXiv:2110.02861) for the 8-bit type and the blocks; Gupta et al. 2015 (arXiv:1502.02551) for
    the rounding.
    """

    found_inf: Tensor | None = None

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
        # `fused` tells the guard that it may hand over `found_inf`.
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "fused": True})
        self._rounds_at_random = rounds_at_random
        self._seed = seed
        self._steps_done: int | None = None
        self._tables: dict[torch.device, tuple[_Table, _Table]] = {}
        for parameter in self._parameters():
            self.state[parameter] = _fresh_state(parameter, eight_bit, rounds_at_random)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; the gradients stay as they are."""
        assert closure is None, "isles evaluates a loss once a step"
        number = self._next_number()
        place = -1
        for group in self.param_groups:
            ready = []
            for parameter in group["params"]:
                place += 1
                if parameter.grad is not None:
                    ready.append((place, parameter))
            if ready:
                self._step_group(group, ready, number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over moments, bit for bit; torch's own would turn codes into floats.

        Hyperparameters stay: they come from the run file.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"][key].items():
                    _local(self.state[parameter][name]).copy_(_local(value))
        self._steps_done = None

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _next_number(self) -> int:
        """Steps taken before, over all starts of the run; read from the device once a start."""
        if self._steps_done is None:
            steps = torch.stack([self.state[p]["step"] for p in self._parameters()])
            self._steps_done = int(steps.max().item()) if self._rounds_at_random else 0
        self._steps_done += 1
        return self._steps_done

    def _step_group(
        self, group: dict[str, Any], ready: list[tuple[int, nn.Parameter]], number: int
    ) -> None:
        steps = [self.state[parameter]["step"] for _, parameter in ready]
        device = steps[0].device
        keep = None if self.found_inf is None else self.found_inf.to(device) == 0
        if keep is None:
            torch._foreach_add_(steps, 1.0)
        else:
            torch._foreach_add_(steps, [keep.float()] * len(steps))
        # Until the first good step the count is 0, and what it divides is thrown away.
        counts = torch.stack(steps).double().clamp(min=1)
        beta1, beta2 = group["betas"]
        sizes = (group["lr"] / (1 - beta1**counts)).float().unbind()
        roots = (1 - beta2**counts).sqrt().float().unbind()
        for (place, parameter), size, root in zip(ready, sizes, roots, strict=True):
            rates = _Rates(
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                shrink=1 - group["lr"] * group["weight_decay"],
                size=size,
                root=root,
            )
            self._step_one(parameter, rates, keep, self._dice(parameter, place, number))

    def _step_one(
        self, parameter: nn.Parameter, rates: _Rates, keep: Tensor | None, dice: torch.Generator
    ) -> None:
        weights, gradient = _local(parameter), _local(parameter.grad)
        state = self.state[parameter]
        moments = [
            _Moment(_local(state[name]), _local(state.get(f"{name}_scale")), table)
            for name, table in zip(_MOMENTS, self._tables_on(weights.device), strict=True)
        ]
        weights, gradient = _with_rows(weights), _with_rows(gradient)
        length = weights.shape[0]
        rows = max(1, _CHUNK * length // max(1, weights.numel()))
        for start in range(0, length, rows):
            span = (start, min(rows, length - start))
            _update(
                weights.narrow(0, *span),
                gradient.narrow(0, *span),
                [moment.narrow(*span) for moment in moments],
                rates,
                _Writer(keep, dice if self._rounds_at_random else None),
            )

    def _dice(self, parameter: nn.Parameter, place: int, number: int) -> torch.Generator:
        """Random numbers of one shard in one step."""
        data: Any = parameter.data
        shard: tuple[int, ...] = ()
        if isinstance(data, DTensor):
            where = data.device_mesh.get_coordinate() or ()
            shard = tuple(
                index
                for index, placement in zip(where, data.placements, strict=True)
                if placement.is_shard()
            )
        dice = torch.Generator(_local(data).device)
        if self._rounds_at_random:
            text = f"{self._seed} {number} {place} {shard}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            dice.manual_seed(int.from_bytes(digest, "big") >> 1)
        return dice

    def _tables_on(self, device: torch.device) -> tuple[_Table, _Table]:
        if device not in self._tables:
            self._tables[device] = (
                _Table.on(device, is_signed=True),
                _Table.on(device, is_signed=False),
            )
        return self._tables[device]


def dynamic_map(*, is_signed: bool) -> Tensor:
    """The 256 numbers that a code stands for, in rising order, fp32, from -1 (or 0) to 1.

    Source: Dettmers 2016 (arXiv:1511.04561), section 2.1: in each of seven decades below 1 the
    middles of equal intervals, twice as many as in the decade below it.
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(7):
        count = 2**decade if is_signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [middles, -middles] if is_signed else [middles]
    return torch.cat(values).sort().values.float()


def round_at_random(values: Tensor, dice: torch.Generator) -> Tensor:
    """fp32 as bf16, up or down with the probability that makes the mean right.

    Adding a random 16-bit number to the bits that bf16 lacks carries into the rest that often.
    """
    noise = torch.randint(
        1 << 16, values.shape, generator=dice, dtype=torch.int32, device=values.device
    )
    bits = values.view(torch.int32) + noise
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


@dataclass(frozen=True, slots=True)
class _Rates:
    """What a step does to every number of a parameter; `size` and `root` are on the device."""

    beta1: float
    beta2: float
    eps: float
    shrink: float
    size: Tensor
    root: Tensor


@dataclass(frozen=True, slots=True)
class _Writer:
    """Puts new values in the place of old ones, unless the step is to be skipped."""

    keep: Tensor | None
    dice: torch.Generator | None

    def put(self, old: Tensor, new: Tensor) -> None:
        """fp32 values into a tensor of any type."""
        if self.dice is not None and old.dtype == torch.bfloat16:
            new = round_at_random(new, self.dice)
        old.copy_(new if self.keep is None else torch.where(self.keep, new.to(old.dtype), old))


@dataclass(frozen=True, slots=True)
class _Table:
    """The numbers that codes stand for, and the borders between them."""

    numbers: Tensor
    borders: Tensor

    @classmethod
    def on(cls, device: torch.device, *, is_signed: bool) -> _Table:
        """The table of signed or of positive numbers."""
        numbers = dynamic_map(is_signed=is_signed)
        return cls(numbers.to(device), ((numbers[:-1] + numbers[1:]) / 2).to(device))


@dataclass(frozen=True, slots=True)
class _Moment:
    """Some rows of a moment: numbers, or codes with the scale of each block."""

    values: Tensor
    scale: Tensor | None
    table: _Table

    def narrow(self, start: int, length: int) -> _Moment:
        """Some rows of these rows."""
        values = _with_rows(self.values).narrow(0, start, length)
        scale = None if self.scale is None else self.scale.narrow(0, start, length)
        return _Moment(values, scale, self.table)

    def read(self) -> Tensor:
        """A new fp32 tensor."""
        if self.scale is None:
            return self.values.to(torch.float32, copy=True)
        shares = self.table.numbers[self.values.int()]
        return (_blocks(shares, self.scale) * self.scale.unsqueeze(-1)).flatten(-2)

    def write(self, new: Tensor, writer: _Writer) -> None:
        """Take over fp32 values."""
        if self.scale is None:
            writer.put(self.values, new)
            return
        blocks = _blocks(new, self.scale)
        scale = blocks.abs().amax(-1).clamp_(min=1e-30)
        shares = (blocks / scale.unsqueeze(-1)).flatten(-2)
        codes = torch.bucketize(shares, self.table.borders, out_int32=True)
        writer.put(self.values, codes)
        writer.put(self.scale, scale)


def _update(
    weights: Tensor, gradient: Tensor, moments: Sequence[_Moment], rates: _Rates, writer: _Writer
) -> None:
    """One step of some rows, in fp32 whatever they are held in."""
    gradient = gradient.float()
    first, second = (moment.read() for moment in moments)
    first.lerp_(gradient, 1 - rates.beta1)
    second.mul_(rates.beta2).addcmul_(gradient, gradient, value=1 - rates.beta2)
    new = weights.to(torch.float32, copy=True).mul_(rates.shrink)
    below = second.sqrt().div_(rates.root).add_(rates.eps)
    new.sub_((first / below).mul_(rates.size))
    writer.put(weights, new)
    for moment, value in zip(moments, (first, second), strict=True):
        moment.write(value, writer)


def _fresh_state(
    parameter: nn.Parameter, eight_bit: bool, rounds_at_random: bool
) -> dict[str, Tensor]:
    """Zeros, there from the start: a checkpoint before the first step has them too."""
    state = {"step": torch.zeros((), device=_local(parameter.data).device)}
    block = _block_length(parameter) if eight_bit else None
    for name in _MOMENTS:
        if block is None:
            keeps_type = rounds_at_random and not eight_bit
            dtype = parameter.dtype if keeps_type else torch.float32
            state[name] = torch.zeros_like(parameter, dtype=dtype)
        else:
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{name}_scale"] = _zero_scales(parameter, block)
    return state


def _block_length(parameter: nn.Parameter) -> int | None:
    """Numbers of a row that share a scale; None: this tensor keeps fp32 state.

    It depends on what all ranks know alike, so that they hold the same kinds of state.
    """
    if parameter.ndim < 2 or parameter.numel() < _LEAST_NUMEL:
        return None
    width = _local(parameter.data).shape[-1]
    block = min(_LONGEST_BLOCK, width & -width)
    return block if block >= _SHORTEST_BLOCK else None


def _zero_scales(parameter: nn.Parameter, block: int) -> Tensor:
    data: Any = parameter.data
    local = _local(data)
    scales = torch.zeros((*local.shape[:-1], local.shape[-1] // block), device=local.device)
    if not isinstance(data, DTensor):
        return scales
    shape = torch.Size((*data.shape[:-1], data.shape[-1] // block))
    stride = torch.empty(shape, device="meta").stride()
    cut = DTensor.from_local(
        scales, data.device_mesh, data.placements, run_check=False, shape=shape, stride=stride
    )
    return cut.to(local.device)  # from_local moves offloaded ones to the GPU


def _blocks(rows: Tensor, scale: Tensor) -> Tensor:
    """The numbers of each scale, on an axis of their own."""
    return rows.reshape(*scale.shape, rows.shape[-1] // scale.shape[-1])


def _with_rows(tensor: Tensor) -> Tensor:
    """A view of it that has a first axis."""
    return tensor.view(1) if tensor.ndim == 0 else tensor


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor; whatever is not sharded as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

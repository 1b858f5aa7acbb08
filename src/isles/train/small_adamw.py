"""AdamW for small memories, by torchao: its state in 8 bits, or bf16 weights rounded at random."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

_LEAST_NUMEL = 4096
"""Tensors below this keep plain state: they are nothing in sum, and norms mind the noise most."""

_LONGEST_BLOCK, _SHORTEST_BLOCK = 256, 32
"""Numbers that share one scale; with fewer the scales would eat what the codes save."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


class SmallAdamW(AdamW8bit):  # type: ignore[misc]  # torchao has no types
    """torchao's AdamW with blocks that lie within rows, and rounding that ranks agree on.

    So a scale belongs to one rank's rows, codes and scales are cut like the matrix, and a
    checkpoint is taken over by any number of ranks, bit for bit.

    Args:
        groups: parameters with their `weight_decay`, whole or sharded (DTensors).
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: offset of the denominator.
        eight_bit: hold the moments of matrices in 8 bits; other moments in the parameter's type.
        rounds_at_random: round weights in bf16 stochastically.
        seed: of the random numbers.
    """

    param_groups: list[dict[str, Any]]

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
        self._eight_bit = eight_bit
        self._seed = seed
        self._num_steps: int | None = None
        super().__init__(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            bf16_stochastic_round=rounds_at_random,
        )
        # There from the start: a checkpoint before the first step has it too.
        for parameter in self._parameters():
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": self._new_buffer(parameter, True),
                "exp_avg_sq": self._new_buffer(parameter, False),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step every parameter that has a gradient; the gradients stay as they are."""
        # Compiled, a step never holds fp32 copies of a whole matrix; a CPU may have no compiler.
        is_cpu = _local(next(self._parameters())).device.type == "cpu"
        with torch.compiler.set_stance("force_eager" if is_cpu else "default"):
            if self.bf16_stochastic_round:
                self._step_rounding()
            else:
                super().step()

    def _step_rounding(self) -> None:
        # One by one, each with random numbers of its own: ranks that hold the same shard round it
        # alike, whatever else they hold, and a resumed run rounds as it would have.
        groups = self.param_groups
        number = self._next_number()
        device = _local(next(self._parameters())).device
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                places = ((group, p) for group in groups for p in group["params"])
                for place, (group, parameter) in enumerate(places):
                    torch.manual_seed(self._dice(parameter, place, number))
                    self.param_groups = [{**group, "params": [parameter]}]
                    super().step()
        finally:
            self.param_groups = groups

    def state_dict(self) -> dict[str, Any]:
        """torchao's, with codes and scales as tensors of their own, cut as the parameter is."""
        found: dict[str, Any] = super().state_dict()
        for group in found["param_groups"]:
            group["lr"] = float(group["lr"])
        plain = map(self._plain_state, self._parameters())
        found["state"] = dict(enumerate(plain))
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over moments, bit for bit. Hyperparameters stay: they come from the run file."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in self._plain_state(parameter).items():
                    _local(value).copy_(_local(state_dict["state"][key][name]))
        self._num_steps = None

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _next_number(self) -> int:
        # Steps taken before, over all starts of the run.
        if self._num_steps is None:
            self._num_steps = int(max(float(self.state[p]["step"]) for p in self._parameters()))
        self._num_steps += 1
        return self._num_steps

    def _dice(self, parameter: nn.Parameter, place: int, number: int) -> int:
        data: Any = parameter.data
        shard: tuple[int, ...] = ()
        if isinstance(data, DTensor):
            where = data.device_mesh.get_coordinate() or ()
            cuts = zip(where, data.placements, strict=True)
            shard = tuple(index for index, placement in cuts if placement.is_shard())
        text = f"{self._seed} {number} {place} {shard}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def _new_buffer(self, parameter: nn.Parameter, signed: bool) -> Tensor:
        local = _local(parameter.data)
        block = self._block_length(parameter)
        if block is None or local.numel() == 0:
            return torch.zeros_like(parameter.data)
        coded = OptimState8bit.zeros(local.shape, signed, block, local.device, dtype=local.dtype)
        return _cut_like(parameter, coded)

    def _block_length(self, parameter: nn.Parameter) -> int | None:
        # Numbers of a row that share a scale; None: this tensor keeps plain state. It depends on
        # what all ranks know alike, so that they hold the same kinds of state.
        if not self._eight_bit or parameter.ndim < 2 or parameter.numel() < _LEAST_NUMEL:
            return None
        width = _local(parameter.data).shape[-1]
        block = min(_LONGEST_BLOCK, width & -width)
        return block if block >= _SHORTEST_BLOCK else None

    def _plain_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = dict(self.state[parameter])
        block = self._block_length(parameter)
        if block is None:
            return state
        for name in _MOMENTS:
            held: Any = _local(state[name])
            codes, scale = (held.codes, held.scale) if held.numel() else (held.byte(), held)
            scale = scale.view(*codes.shape[:-1], codes.shape[-1] // block)
            state[name] = _cut_like(parameter, codes)
            state[f"{name}_scale"] = _cut_like(parameter, scale)
        return state


def _cut_like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    data: Any = parameter.data
    if not isinstance(data, DTensor):
        return local
    width = data.shape[-1] * local.shape[-1] // _local(data).shape[-1]
    shape = torch.Size((*data.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    cut = DTensor.from_local(
        local, data.device_mesh, data.placements, run_check=False, shape=shape, stride=stride
    )
    return cut.to(local.device)  # from_local moves offloaded ones to the GPU


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

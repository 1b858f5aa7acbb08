"""ZeRO's flat shards, converted to named tensors with shapes and back, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from isles.dist.world import World


class ZeroState:
    """Weights and optimizer state of a ZeRO optimizer, one tensor at a time.

    No rank ever holds more than one whole tensor in addition to those assigned to it.

    Args:
        zero: DeepSpeed's optimizer: for stages 1 and 2, for stage 3, or for stage 1 in bf16.
        optimizer: the torch optimizer inside.
    """

    def __init__(self, model: nn.Module, zero: Any, optimizer: Optimizer, world: World) -> None:
        self._zero = zero
        self._optimizer = optimizer
        self._rank = world.rank
        self._world_size = world.world_size
        self._device = world.device
        self._is_stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
        self._fields = _fields(optimizer)
        # Tied weights have several names in a checkpoint, and state only under the first.
        self._names = list(_kept(model).items())
        self._first = {p: name for name, p in model.named_parameters()}
        self._trained = {name: p for p, name in self._first.items() if p.requires_grad}
        self._owners = self._deal()
        self._start_state()

    @property
    def is_main(self) -> bool:
        """True if this rank saves the values that belong to no parameter."""
        return self._rank == 0

    def parts(self) -> list[nn.Parameter]:
        """This rank's flat shards, in fp32."""
        if self._is_stage3:
            return list(self._zero.fp32_partitioned_groups_flat)
        if hasattr(self._zero, "single_partition_of_fp32_groups"):
            return list(self._zero.single_partition_of_fp32_groups)
        return list(self._zero.fp32_groups_flat_partition)

    def collect(self) -> dict[str, Tensor]:
        """The tensors assigned to this rank, whole, in CPU memory. All ranks must call this."""
        state: dict[str, Tensor] = {}
        step = torch.zeros(())
        if "step" in self._fields:
            step = self._optimizer.state[self.parts()[0]]["step"]
        for key, value, field in self._entries():
            is_mine = self._owners[key] == self._rank
            tensor = step if field == "step" else self._whole(value, field, is_mine=is_mine)
            if is_mine:
                state[key] = tensor.detach().to("cpu", copy=True)
        return state

    def spread(self, state: dict[str, Tensor]) -> None:
        """Load the tensors from `collect`, from the ranks that hold them.

        All ranks must call this.
        """
        for key, value, field in self._entries():
            is_mine = self._owners[key] == self._rank
            shape = torch.Size() if field == "step" else getattr(value, "ds_shape", value.shape)
            dtype = torch.float32 if value.is_floating_point() else value.dtype
            whole = torch.empty(shape, dtype=dtype, device=self._device)
            if is_mine:
                whole.copy_(state[key])
            if self._world_size > 1:
                dist.broadcast(whole, src=self._owners[key])
            if field == "step":
                for part in self.parts():
                    self._optimizer.state[part]["step"].copy_(whole)
            else:
                self._set(value, field, whole)
        self.push()

    def trained_shapes(self) -> dict[str, torch.Size]:
        """Full shapes of the trained parameters, in the model's order; tied parameters once."""
        return {
            name: torch.Size(getattr(value, "ds_shape", value.shape))
            for name, value in self._trained.items()
        }

    def whole_weight(self, name: str) -> Tensor:
        """One trained parameter, gathered, in fp32, on the rank's device. All ranks must
        call this."""
        whole = self._whole(self._trained[name], None, is_mine=True)
        return whole.detach().to(self._device, torch.float32)

    def set_whole_weight(self, name: str, whole: Tensor) -> None:
        """Set one trained parameter; see `push`. All ranks must call this."""
        self._set(self._trained[name], None, whole)

    def share(self, value: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rank 0's value on every rank. All ranks must call this."""
        shared = torch.zeros((), dtype=dtype, device=self._device)
        if value is not None:
            shared.copy_(value)
        if self._world_size > 1:
            dist.broadcast(shared, src=0)
        return shared

    def _entries(self) -> Iterator[tuple[str, Tensor, str | None]]:
        # Key in a checkpoint, parameter or buffer, field of the optimizer's state.
        for name, value in self._names:
            yield f"model.{name}", value, None
            if isinstance(value, nn.Parameter) and self._first.get(value) == name:
                for field in self._fields if value.requires_grad else ():
                    yield f"optimizer.state.{name}.{field}", value, field

    def _deal(self) -> dict[str, int]:
        # Assigns tensors to ranks for saving: the largest first, to the rank with the fewest bytes.
        sizes = {
            key: 1 if field == "step" else int(getattr(value, "ds_numel", value.numel()))
            for key, value, field in self._entries()
        }
        load = [0] * self._world_size
        owners = {}
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            owners[key] = load.index(min(load))
            load[owners[key]] += sizes[key]
        return owners

    def _start_state(self) -> None:
        # Start with zeros, which is mathematically equivalent: state that a checkpoint can fill.
        self._optimizer.state.clear()  # keyed by whole parameters, which are not stepped any more
        for index, part in enumerate(self.parts()):
            with _Swapped(self._zero, index):
                fields = self._optimizer.state[part]
                for field in self._fields:
                    shape = torch.Size() if field == "step" else part.shape
                    fields[field] = torch.zeros(shape, dtype=torch.float32, device=part.device)
        if not self._is_stage3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def _whole(self, value: Tensor, field: str | None, *, is_mine: bool) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if field is not None:
            return _known(safe_get_full_optimizer_state(value, field))
        if isinstance(value, nn.Parameter) and value.requires_grad:
            return _known(safe_get_full_fp32_param(value))
        with _gathered(value):
            copy = value.detach().clone() if is_mine else value.detach()
            return copy.float() if isinstance(value, nn.Parameter) else copy

    def _set(self, value: Tensor, field: str | None, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if not (isinstance(value, nn.Parameter) and value.requires_grad):
            with _gathered(value, changes=True):
                value.detach().copy_(whole)
        elif self._is_stage3:
            # If sizes do not divide, the last shard is longer than the rest of the tensor;
            # DeepSpeed's own function for whole tensors fails then.
            cut: Any = value  # with the attributes that DeepSpeed adds to a parameter
            size = int(cut.ds_tensor.numel())
            part = torch.zeros(size, dtype=whole.dtype, device=whole.device)
            mine = whole.flatten()[self._rank * size :][:size]
            part[: mine.numel()] = mine
            self._zero.set_local_hp_param(part, value, field)
        elif field is None:
            safe_set_full_fp32_param(value, whole)
        else:
            safe_set_full_optimizer_state(value, whole, field)

    @torch.no_grad()
    def push(self) -> None:
        """Copy the fp32 shards to the parameters that the model computes with."""
        zero = self._zero
        if not self._is_stage3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for index in range(len(zero.fp16_groups)):
            with _Swapped(zero, index):
                zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:  # small parameters, which every rank keeps whole
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


class _Swapped:
    """Loads the state of a shard from disk, if it is offloaded there, and writes it back."""

    def __init__(self, zero: Any, index: int) -> None:
        is_swapped = getattr(zero, "_swappable_optimizer_subgroup", None)
        self._is_swapped = is_swapped is not None and is_swapped(index)
        self._zero = zero
        self._index = index

    def __enter__(self) -> None:
        if self._is_swapped:
            self._zero._optimizer_states_and_gradient_swap_in(self._index)

    def __exit__(self, *_: object) -> None:
        if self._is_swapped:
            self._zero._optimizer_states_and_gradient_swap_out(self._index)


def _kept(model: nn.Module) -> dict[str, Tensor]:
    # Content of a checkpoint: everything, or with frozen weights only the trained part.
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if all(p.requires_grad for p in model.parameters()):
        return state
    return {name: value for name, value in state.items() if value.requires_grad}


def _fields(optimizer: Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, AdamW):
        return ("step", "exp_avg", "exp_avg_sq")
    assert isinstance(optimizer, SGD), type(optimizer)
    return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()


def _gathered(value: Tensor, *, changes: bool = False) -> Any:
    # Gathers a frozen parameter of stage 3 temporarily; all others are whole anyway.
    from deepspeed.runtime.zero import GatheredParameters

    is_cut = hasattr(value, "ds_id")
    return GatheredParameters([value], modifier_rank=0 if changes else None, enabled=is_cut)


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a trained parameter that DeepSpeed does not know"
    return tensor

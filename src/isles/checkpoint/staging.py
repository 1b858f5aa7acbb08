"""The copy in main memory that a save writes while training changes the originals."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isles.facts.units import format_bytes
from isles.run.limits import memory

log = logging.getLogger(__name__)

_ALIGN_BYTES = 64
_MOST_KEPT = 0.5
"""Share of the available main memory that the ranks of a node may keep between saves."""


def assigned(state: Mapping[str, Tensor], replicas: tuple[int, int]) -> dict[str, Tensor]:
    """The tensors that this rank writes.

    The ranks that hold the same replicated tensors divide them by size, so that each tensor is
    copied and written once. Shards stay with their rank.

    Args:
        state: tensors and shards (DTensors) by name.
        replicas: this rank's number among the ranks with the same plain tensors, and the number of
            these ranks.
    """
    rank, world_size = replicas
    plain = [name for name, value in state.items() if not isinstance(value, DTensor)]
    loads = [0] * world_size
    mine: set[str] = {name for name in state if isinstance(state[name], DTensor)}
    for name in sorted(plain, key=lambda n: (-state[n].numel() * state[n].element_size(), n)):
        owner = loads.index(min(loads))
        loads[owner] += state[name].numel() * state[name].element_size()
        if owner == rank:
            mine.add(name)
    return {name: value for name, value in state.items() if name in mine}


class Buffers:
    """Main memory for the copies of a rank, kept from save to save.

    On CUDA the memory is pinned, so that a copy runs at the speed of the bus. A copy into other
    memory is several times slower.

    Args:
        device: of the tensors.
        ranks_on_node: ranks that share this node's main memory.
    """

    def __init__(self, device: torch.device, ranks_on_node: int) -> None:
        self._device, self._ranks_on_node = device, ranks_on_node
        self._kept: Tensor | None = None
        self._is_pinned, self._keeps = False, True

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors, by name, which are valid until the next call. Waits for the device.

        Copies of shards (DTensors) are shards on the CPU.
        """
        local = {name: _local(value) for name, value in tensors.items()}
        starts, size = dict[str, int](), 0
        for name, value in local.items():
            starts[name] = size
            size += -(-value.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        buffer = self._reserve(size)
        copies = {}
        for name, value in local.items():
            place = buffer[starts[name] : starts[name] + value.nbytes]
            copy = place.view(value.dtype).view(value.shape)
            # The copies are in the order of the stream, so no later step changes a tensor early.
            copy.copy_(value, non_blocking=True)
            copies[name] = _like(copy, tensors[name])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def close(self) -> None:
        """Give the memory back. No copy may be in use."""
        if self._kept is not None and self._is_pinned:
            _runtime().cudaHostUnregister(self._kept.data_ptr())
        self._kept, self._is_pinned = None, False

    def _reserve(self, size: int) -> Tensor:
        # At least `size` bytes. Other memory is kept only if enough remains for the data.
        if self._kept is not None and len(self._kept) >= size:
            return self._kept
        self.close()
        new = torch.empty(size, dtype=torch.uint8)
        available = memory().available
        if self._keeps and size * self._ranks_on_node > _MOST_KEPT * available:
            self._keeps = False
            log.info(
                "a checkpoint needs %s of main memory on each rank, too much of the available %s "
                "to keep it between saves",
                *(format_bytes(size), format_bytes(available)),
            )
        if self._keeps and size > 0:
            self._kept, self._is_pinned = new, self._pin(new)
        return new

    def _pin(self, buffer: Tensor) -> bool:
        if self._device.type != "cuda":
            return False
        # Pinned memory of torch is up to twice as large, because torch rounds to a power of two.
        error = int(_runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if error:
            log.info("copies for checkpoints are slower: CUDA pins no memory, error=%d", error)
            with contextlib.suppress(RuntimeError):  # the next kernel would report it once more
                torch.ones(1, device=self._device)
        return error == 0


def _runtime() -> Any:
    cuda: Any = torch.cuda  # its types lack the runtime
    return cuda.cudart()


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value.detach()


def _like(copy: Tensor, value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return copy
    # Not `from_local`, which would move the copy to the device of the mesh.
    make: Any = DTensor
    shard: Tensor = make(copy, value._spec, requires_grad=False)
    return shard

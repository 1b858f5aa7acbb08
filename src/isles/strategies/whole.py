"""The trained weights of a model as whole tensors, one at a time, however its ranks hold them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class WholeWeights:
    """Reads and writes parameters that are whole, or cut over ranks (DTensors).

    Tied weights are one parameter, under the first of their names.

    Args:
        model: with its parameters in place, cut or whole.
        device: where this rank computes.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._device = device

    def shapes(self) -> dict[str, torch.Size]:
        """See Engine.trained_shapes."""
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    def get(self, name: str) -> Tensor:
        """See Engine.whole_weight."""
        value = self._parameters[name].detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.to(self._device, torch.float32)

    @torch.no_grad()
    def set(self, name: str, whole: Tensor) -> None:
        """See Engine.set_whole_weight."""
        value = self._parameters[name].detach()
        if not isinstance(value, DTensor):
            value.copy_(whole)
            return
        shape, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        part = tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))
        value.to_local().copy_(whole[part])

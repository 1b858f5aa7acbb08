"""Loss scaling for fp16, decided on the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_START = 2.0**16
_LEAST = 2.0**-14
"""Below this the loss itself is lost in fp16; a scaler comes here when every step overflows."""

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000


class LossScaler:
    """One scale for all optimizers and ranks, decided by the global gradient norm.

    Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2, with the constants of
    torch.amp.GradScaler.
    """

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.full((), _START, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss whose gradients are large enough for fp16."""
        return loss * self._scale

    def unscale(self, gradients: Sequence[Tensor], norm: Tensor) -> Tensor:
        """Take the scale out of the gradients, in place, and out of their norm."""
        inverse = 1.0 / self._scale
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device))  # offloaded, it is on the CPU
        return norm * inverse

    def update(self, overflow: Tensor) -> None:
        """Choose the next scale; `overflow`: 1.0 where this step's norm was not finite."""
        torch._amp_update_scale_(self._scale, self._growth, overflow, _GROWTH, _BACKOFF, _INTERVAL)

    def health(self) -> Tensor:
        """Finite while the scale is of use, infinite once it has fallen to nothing."""
        return 1.0 / (self._scale >= _LEAST).float()

    def state_dict(self) -> dict[str, Tensor]:
        """`scale` (fp64) and `growth` (int32), on the CPU."""
        return {"scale": self._scale.double().cpu(), "growth": self._growth.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave."""
        self._scale.copy_(state["scale"])
        self._growth.copy_(state["growth"])

"""Keeps the weights of the last good step when a loss or gradient is not finite."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class StepGuard:
    """Remembers on the device, without waiting for it, that something was not finite.

    From then on no optimizer step changes anything, so the host may notice steps later and still
    finds the weights of the last good step.
    """

    def __init__(self, device: torch.device) -> None:
        self._poison = torch.zeros((), device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)

    def watch(self, value: Tensor) -> None:
        """Note whether a loss or norm is finite."""
        torch.maximum(self._poison, (~torch.isfinite(value.detach())).float(), out=self._poison)

    def agree(self) -> None:
        """Poisoned on one rank, poisoned on all. All ranks must call this.

        Only where gradients that are not finite do not tell the others (a loss scaler drops them).
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._poison, op=dist.ReduceOp.MAX)

    def spoil(self, loss: Tensor) -> Tensor:
        """The loss, or NaN with gradients that are NaN once poisoned, so that DeepSpeed skips the
        step."""
        # A product: what torch.where leaves out gets a gradient of zero, which moves the weights.
        return loss * torch.where(self._poison > 0, torch.nan, 1.0)

    def step(self, optimizer: Optimizer, *, skip: Tensor | None = None) -> None:
        """Step an optimizer unless poisoned, or unless `skip` is 1.0 for this step."""
        stops = self._poison if skip is None else torch.maximum(self._poison, skip)
        if optimizer.defaults.get("fused"):
            # The fused kernels skip by this flag, as a loss scaler uses it, without a sync. Where
            # parameters are offloaded, torch would read its copy there before it has arrived.
            where = optimizer.param_groups[0]["params"][0].device
            optimizer.found_inf = stops.to(where)  # type: ignore[attr-defined]
            optimizer.step()
        elif stops.item() == 0:
            optimizer.step()

    def count(self) -> None:
        """One optimizer step is over."""
        self._good += (self._poison == 0).long()

    def good_steps(self) -> int | None:
        """Good steps before the first bad one; None while all are good. Waits for the device."""
        return int(self._good.item()) if self._poison.item() else None

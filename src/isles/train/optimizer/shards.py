"""Parts of sharded tensors, and steps that a flag on the device can skip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor; other tensors unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """1.0 if this step must change nothing; None outside of a stepper."""
    flag: Tensor | None = getattr(optimizer, "found_inf", None)
    return flag


def put(stops: Tensor | None, old: list[Tensor], new: list[Tensor]) -> None:
    """Copy new values into old tensors, unless `stops` is 1.0."""
    if stops is None:
        torch._foreach_copy_(old, new)
        return
    # Selected, because a product of NaN and 0 is NaN.
    keeps = stops != 0
    for before, after in zip(old, new, strict=True):
        torch.where(keeps, before, after, out=before)

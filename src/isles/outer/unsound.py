"""What no update may hold: numbers that are not finite, or so large that they soon are not."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 2.0**126
"""What a codec takes at most, so that no sum or scale of it overflows in fp32."""

_SLAB = 1 << 16


class UnsoundUpdateError(ValueError):
    """An update that must not be averaged; the text says why."""


def check_magnitude(x: Tensor) -> None:
    """Look at all numbers of a piece.

    Raises:
        UnsoundUpdateError: one is not finite, or too large.
    """
    slab = _SLAB if x.device.type == "cpu" else max(1, x.numel())
    largest = torch.stack([torch.amax(part.abs()) for part in torch.split(x, slab)])
    check_largest(largest, x)


def check_largest(largest: Tensor, x: Tensor) -> None:
    """Look at the largest magnitudes of parts of `x`.

    Raises:
        UnsoundUpdateError: one is not finite, or too large; it names the first such number of x.
    """
    if bool((largest <= LARGEST).all()):  # false for NaN
        return
    index = int((~(x.abs() <= LARGEST)).nonzero()[0])
    raise UnsoundUpdateError(
        f"number {index} of {x.numel()} is {float(x[index])}, not a finite one up to {LARGEST:.0e}"
    )

"""The seams of the outer step: how weights are reached, what is set, comes back, and is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

LARGEST = 2.0**126
"""What a codec takes at most, so that no sum or scale of it overflows in fp32."""

_SLAB = 1 << 16

Mode = Literal["on_time", "overlap", "late", "idle"]
"""How an average finds this cluster's weights.

on_time: they are those of the contribution, which is in the average: they become the outer
parameters.
overlap: inner steps were made since the contribution, which is in the average.
late: this cluster's contribution is not in the average, or it made none.
idle: so, and nothing was learnt here since the last average: they become the outer parameters.
"""


class Weights(Protocol):
    """The trained weights of one cluster as whole tensors; an engine of `strategies` is one."""

    def trained_shapes(self) -> Mapping[str, torch.Size]: ...

    def whole_weight(self, name: str) -> Tensor: ...

    def set_whole_weight(self, name: str, value: Tensor) -> None: ...

    def weights_set(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """The outer optimizer: SGD with Nesterov momentum over pseudo-gradients.

    Args:
        lr: the outer learning rate.
        momentum: 0 for none.
        max_norm: longest averaged pseudo-gradient of a fragment; a longer one is shortened to it.
    """

    lr: float = 0.7
    momentum: float = 0.9
    max_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Contribution:
    """One cluster's encoded pseudo-gradient of a fragment, as a file on rank 0.

    Args:
        size_bytes: of the file.
        sha256: of the file; only rank 0 knows it, "" elsewhere.
        norm: of the pseudo-gradient, before it was encoded and without what is fed back.
    """

    size_bytes: int
    sha256: str
    norm: float


@dataclass(frozen=True, slots=True)
class Applied:
    """An outer step of a fragment that has been made; the same on all ranks.

    Args:
        digest: of the fragment's outer parameters: equal on all clusters.
        norm: of the averaged pseudo-gradient, before it was clipped.
    """

    digest: str
    norm: float


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

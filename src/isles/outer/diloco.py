"""The outer optimizer on one rank's pieces of one fragment; independent of engine and network.

Values that must be equal on all clusters, outer parameters and momentum, are computed with one
operation at a time: a fused multiply-add rounds once instead of twice, and not every processor has
it. These values also do not depend on the order of a library's summation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isles.outer.average import average_size, decode_average
from isles.outer.codec import Codec, UnsoundUpdateError
from isles.outer.layout import ParamSlice

Mode = Literal["on_time", "overlap", "late", "idle"]
"""Relation of an average to this cluster's weights.

on_time: the weights are those of the contribution, which is in the average. They become the outer
parameters. overlap: inner steps were made since the contribution, which is in the average. late:
this cluster's contribution is not in the average, or it made none. idle: late, without progress
since the last average. The weights become the outer parameters.
"""


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """The outer optimizer: SGD with Nesterov momentum over pseudo-gradients."""

    lr: float = 0.7
    momentum: float = 0.9
    max_norm: float | None = None
    """Largest norm of a fragment's averaged pseudo-gradient; a longer one is clipped."""


_LANES = 1 << 16


class FragmentShare:
    """Outer parameters, momentum, and accumulated encoding error, in CPU memory.

    Args:
        pieces: pieces of this rank.
        is_pinned: whether a GPU copies from and to this memory.

    Source: Douillard et al. 2023 (arXiv:2311.08105).
    """

    def __init__(
        self,
        pieces: Sequence[ParamSlice],
        codec: Codec,
        settings: OuterSettings,
        *,
        is_pinned: bool,
    ) -> None:
        self.pieces = tuple(pieces)
        self.counts = [piece.count for piece in pieces]
        self._codec, self._settings, self._is_pinned = codec, settings, is_pinned
        self._ends = [0, *itertools.accumulate(self.counts)]
        self._encoded_sizes = [codec.size(count) for count in self.counts]
        self.outer_param = self._zeros()
        self.momentum = self._zeros() if settings.momentum else None
        self.error = self._zeros() if codec.feeds_back else None
        self.snapshot: Tensor | None = None
        """The local weights of a contribution that no average has answered yet."""
        self.encoded: Tensor | None = None
        """Its encoded bytes."""

    def split(self, flat: Tensor) -> list[Tensor]:
        """Split a tensor with all pieces in a row."""
        return list(torch.split(flat, self.counts)) if self.counts else []

    def piece(self, flat: Tensor, index: int) -> Tensor:
        """One piece of a tensor with all pieces in a row."""
        return flat[self._ends[index] : self._ends[index + 1]]

    def begin_snapshot(self) -> list[Tensor]:
        """Buffers for the local weights of a contribution, by piece; the caller fills them."""
        if self.snapshot is None:
            self.snapshot = self._zeros()
        self.encoded = None
        return self.split(self.snapshot)

    def drop_snapshot(self) -> None:
        """Forget a contribution that is in no average: its progress stays in the next one."""
        self.snapshot = self.encoded = None

    def encode(self) -> list[float]:
        """Encode the pseudo-gradient of the snapshot, plus the residual, into `encoded`.

        Nothing else changes: the encoding error counts only after the contribution is averaged.

        Returns:
            For each piece the sum of the squares of its pseudo-gradient.

        Raises:
            UnsoundUpdateError: a number is not finite, or too large; the text has the parameter.
        """
        encoded = torch.empty(sum(self._encoded_sizes), dtype=torch.uint8)
        squares = []
        parts = torch.split(encoded, self._encoded_sizes) if self.pieces else ()
        for index, (piece, data) in enumerate(zip(self.pieces, parts, strict=True)):
            update = self._pseudo_gradient(index)
            squares.append(square_sum(update))
            self._add_residual(update, index)
            try:
                self._codec.encode(update, data)
            except UnsoundUpdateError as error:
                place = f"{piece.name}, numbers {piece.start} to {piece.stop - 1}"
                raise UnsoundUpdateError(f"{place}: {error}") from None
        self.encoded = encoded
        return squares

    def average_sizes(self, num_parts: int) -> list[int]:
        """Bytes of each piece of an average over `num_parts` contributions."""
        text = self._codec.text
        return [average_size(text, count, num_parts) for count in self.counts]

    def square_sums(self, average: Tensor, num_parts: int) -> list[float]:
        """For each piece of an average the sum of its squares; not finite if the piece is not."""
        sums = []
        for data, count in zip(self._cut(average, num_parts), self.counts, strict=True):
            gradient = torch.empty(count)
            decode_average(self._codec, data, gradient)
            sums.append(square_sum(gradient))
        return sums

    def step(
        self,
        average: Tensor,
        num_parts: int,
        mode: Mode,
        *,
        alpha: float,
        scale: float,
        is_warmup: bool = False,
    ) -> Tensor | None:
        """Make the outer step.

        Args:
            average: the bytes of this rank's pieces, one after the other.
            num_parts: number of contributions in it.
            alpha: overlap: fraction of the way from the snapshot to the outer parameters that the
                weights
                do not move.
            scale: factor of the averaged pseudo-gradient, see `clip_scale`.
            is_warmup: average only, with learning rate 1 and no momentum.

        Returns:
            The change of the local weights; None: they become the outer parameters.
        """
        is_in = mode in ("on_time", "overlap")
        assert not is_in or self.snapshot is not None, "an average without a contribution"
        if is_in and self.error is not None and self.encoded is None:
            self.encode()  # it was loaded from a checkpoint, so encoding gives the same bytes
        contributed: tuple[Tensor, ...] = ()
        if is_in and self.error is not None and self.pieces:
            assert self.encoded is not None
            contributed = torch.split(self.encoded, self._encoded_sizes)
        move = self._zeros() if mode == "late" else None
        for index, data in enumerate(self._cut(average, num_parts)):
            outer_param = self.piece(self.outer_param, index)
            if contributed and self.error is not None:
                self._keep_residual(index, contributed[index], self.error)
            before = None if move is None else self.piece(move, index).copy_(outer_param)
            outer_param.sub_(self._direction(index, data, scale, is_warmup=is_warmup))
            if before is not None:
                torch.sub(outer_param, before, out=before)
        if mode == "overlap":
            assert self.snapshot is not None
            # The snapshot is not needed any more, so its memory holds the move.
            move = self.snapshot
            torch.sub(self.outer_param, move, out=move).mul_(1.0 - alpha)
        self.drop_snapshot()
        return move

    def adopt(self, outer_param: Tensor, momentum: Tensor | None) -> Tensor:
        """Load another cluster's state; returns the change of the outer parameters.

        A contribution in progress is dropped.
        """
        move = outer_param - self.outer_param
        self.outer_param.copy_(outer_param)
        if self.momentum is not None and momentum is not None:
            self.momentum.copy_(momentum)
        self.drop_snapshot()
        return move

    def _pseudo_gradient(self, index: int) -> Tensor:
        assert self.snapshot is not None, "nothing to contribute: no snapshot was taken"
        return self.piece(self.outer_param, index) - self.piece(self.snapshot, index)

    def _add_residual(self, update: Tensor, index: int) -> None:
        if self.error is not None:
            error = self.piece(self.error, index)
            update.add_(error if self._codec.decay == 1.0 else error * self._codec.decay)

    def _keep_residual(self, index: int, contributed: Tensor, error: Tensor) -> None:
        # The contribution was averaged, so its encoding error becomes the residual.
        update = self._pseudo_gradient(index)
        self._add_residual(update, index)
        sent = torch.empty_like(update)
        self._codec.decode(contributed, sent)
        torch.sub(update, sent, out=self.piece(error, index))

    def _direction(self, index: int, data: Tensor, scale: float, *, is_warmup: bool) -> Tensor:
        # torch.optim.SGD(nesterov=True), in single steps. In the warmup it is the average itself,
        # and the momentum stays as it is.
        gradient = torch.empty(self.counts[index])
        decode_average(self._codec, data, gradient)
        if scale != 1.0:
            gradient.mul_(scale)
        if is_warmup:
            return gradient
        if self.momentum is not None:
            velocity = self.piece(self.momentum, index)
            velocity.mul_(self._settings.momentum)
            velocity.add_(gradient)
            gradient.add_(velocity * self._settings.momentum)
        return gradient.mul_(self._settings.lr)

    def _cut(self, average: Tensor, num_parts: int) -> list[Tensor]:
        sizes = self.average_sizes(num_parts)
        return list(torch.split(average, sizes)) if sizes else []

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(self.counts), pin_memory=self._is_pinned)


def square_sum(x: Tensor) -> float:
    """The sum of the squares of numbers in fp32; bit for bit the same on every machine."""
    lanes = min(_LANES, 1 << max(0, x.numel() - 1).bit_length())
    total = torch.zeros(lanes, dtype=torch.float64)
    for part in torch.split(x, lanes):
        wide = part.double()
        # One addition per lane: torch.sum adds in an order that depends on processor and threads.
        total[: part.numel()].add_(wide.mul_(wide))
    while total.numel() > 1:
        half = total.numel() // 2
        total = total[:half] + total[half:]
    return float(total)


def total_norm(square_sums: Sequence[float]) -> float:
    """The norm of all pieces of a fragment, in their order."""
    # fsum is exact, so no order of addition can change a bit.
    return math.sqrt(math.fsum(square_sums))


def clip_scale(norm: float, max_norm: float | None) -> float:
    """Factor that clips a vector of this norm to `max_norm`."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm

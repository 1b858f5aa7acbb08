"""The outer optimizer on one rank's pieces of one fragment; independent of engine and network.

Values that must be equal on all clusters, outer parameters and momentum, are computed with one
operation at a time: a fused multiply-add rounds once instead of twice, and not every processor has
it. These values also do not depend on the order of a library's summation. So a GPU computes the
same bits as a CPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isles.outer.average import average_size, decode_average
from isles.outer.codec import Codec, UnsoundUpdateError, check_magnitude, is_sound
from isles.outer.layout import ParamSlice
from isles.outer.staging import Staging

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


@dataclass(frozen=True, slots=True)
class _Block:
    # Consecutive pieces of equal size, which are computed together as the rows of a tensor.
    first: int
    num_pieces: int
    count: int
    start: int

    def rows(self, flat: Tensor) -> Tensor:
        # [P, N]: these pieces in a tensor with all pieces in a row.
        stop = self.start + self.num_pieces * self.count
        return flat[self.start : stop].view(self.num_pieces, self.count)

    def bytes(self, data: Tensor, ends: Sequence[int]) -> Tensor:
        # [P, size]: their bytes in the bytes of all pieces, which end there.
        start, stop = ends[self.first], ends[self.first + self.num_pieces]
        return data[start:stop].view(self.num_pieces, -1)


class FragmentShare:
    """Outer parameters, momentum, and accumulated encoding error, in pageable CPU memory.

    Arithmetic on a GPU brings this memory there block by block, through `Staging`.

    Args:
        pieces: pieces of this rank.

    Source: Douillard et al. 2023 (arXiv:2311.08105).
    """

    def __init__(self, pieces: Sequence[ParamSlice], codec: Codec, settings: OuterSettings) -> None:
        self.pieces = tuple(pieces)
        self.counts = [piece.count for piece in pieces]
        self._codec, self._settings = codec, settings
        self._encoded_ends = _ends([codec.size(count) for count in self.counts])
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

    def begin_snapshot(self) -> Tensor:
        """Buffer for the local weights of a contribution, with all pieces in a row; the caller
        fills it."""
        if self.snapshot is None:
            self.snapshot = self._zeros()
        self.encoded = None
        return self.snapshot

    def drop_snapshot(self) -> None:
        """Forget a contribution that is in no average: its progress stays in the next one."""
        self.snapshot = self.encoded = None

    def encode(self, on: Staging) -> list[float]:
        """Encode the pseudo-gradient of the snapshot, plus the residual, into `encoded`.

        Nothing else changes: the encoding error counts only after the contribution is averaged.

        Returns:
            For each piece the sum of the squares of its pseudo-gradient.

        Raises:
            UnsoundUpdateError: a number is not finite, or too large; the text has the parameter.
        """
        assert self.snapshot is not None, "nothing to contribute: no snapshot was taken"
        encoded = torch.empty(self._encoded_ends[-1], dtype=torch.uint8)
        squares: list[float] = []
        with on.open(is_aside=True):
            for block in self._blocks(on.block_numbers):
                squares += on.compute(self._encode, block, self.snapshot, encoded)
        self.encoded = encoded
        return squares

    def _encode(self, on: Staging, block: _Block, snapshot: Tensor, encoded: Tensor) -> list[float]:
        update = on.bring(block.rows(self.outer_param)) - on.bring(block.rows(snapshot))
        squares = square_sums(update)
        if self.error is not None:
            self._add_residual(update, on.bring(block.rows(self.error)))
        if not is_sound(update):
            self._refuse(block, update.cpu())
        goal = block.bytes(encoded, self._encoded_ends)
        data = torch.empty_like(goal, device=update.device)
        self._codec.write(update, data)
        on.put(data, goal)
        return squares

    def _refuse(self, block: _Block, update: Tensor) -> None:
        for piece, values in zip(self.pieces[block.first :], update, strict=False):
            try:
                check_magnitude(values)
            except UnsoundUpdateError as error:
                place = f"{piece.name}, numbers {piece.start} to {piece.stop - 1}"
                raise UnsoundUpdateError(f"{place}: {error}") from None

    def average_sizes(self, num_parts: int) -> list[int]:
        """Bytes of each piece of an average over `num_parts` contributions."""
        text = self._codec.text
        return [average_size(text, count, num_parts) for count in self.counts]

    def square_sums(self, average: Tensor, num_parts: int, on: Staging) -> list[float]:
        """For each piece of an average the sum of its squares; not finite if the piece is not."""
        ends, sums = _ends(self.average_sizes(num_parts)), list[float]()
        with on.open(is_aside=True):
            for block in self._blocks(on.block_numbers):
                sums += on.compute(self._square_sums, block, block.bytes(average, ends))
        return sums

    def _square_sums(self, on: Staging, block: _Block, data: Tensor) -> list[float]:
        return square_sums(self._decoded(on, block, data))

    def step(
        self,
        average: Tensor,
        num_parts: int,
        mode: Mode,
        on: Staging,
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
            self.encode(on)  # it was loaded from a checkpoint, so encoding gives the same bytes
        # The snapshot is not needed any more, so its memory holds the move.
        move = self._zeros() if mode == "late" else self.snapshot if mode == "overlap" else None
        ends = _ends(self.average_sizes(num_parts))
        with on.open(is_aside=True):
            for block in self._blocks(on.block_numbers):
                data = block.bytes(average, ends)
                on.compute(self._step, block, data, move, mode, alpha, scale, is_warmup=is_warmup)
        self.drop_snapshot()
        return move

    def _step(
        self,
        on: Staging,
        block: _Block,
        average: Tensor,
        move: Tensor | None,
        mode: Mode,
        alpha: float,
        scale: float,
        *,
        is_warmup: bool,
    ) -> None:
        outer_param = on.bring(block.rows(self.outer_param))
        new: list[tuple[Tensor, Tensor]] = []
        snapshot = error = None
        if mode in ("on_time", "overlap") and self.snapshot is not None:
            snapshot = on.bring(block.rows(self.snapshot))
        if snapshot is not None and self.error is not None and self.encoded is not None:
            # The contribution was averaged, so its encoding error becomes the residual.
            error = on.bring(block.rows(self.error))
            update = outer_param - snapshot
            self._add_residual(update, error)
            sent = torch.empty_like(update)
            self._codec.decode(on.bring(block.bytes(self.encoded, self._encoded_ends)), sent)
            torch.sub(update, sent, out=error)
            new.append((error, block.rows(self.error)))
            del update, sent
        gradient = self._decoded(on, block, average)
        if scale != 1.0:
            gradient.mul_(scale)
        # torch.optim.SGD(nesterov=True), in single steps. In the warmup the direction is the
        # average itself, and the momentum stays as it is.
        if not is_warmup:
            if self.momentum is not None:
                velocity = on.bring(block.rows(self.momentum))
                velocity.mul_(self._settings.momentum)
                velocity.add_(gradient)
                gradient.add_(velocity * self._settings.momentum)
                new.append((velocity, block.rows(self.momentum)))
            gradient.mul_(self._settings.lr)
        before = outer_param.clone() if mode == "late" else snapshot
        outer_param.sub_(gradient)
        new.append((outer_param, block.rows(self.outer_param)))
        if move is not None:
            assert before is not None
            change = torch.sub(outer_param, before, out=gradient)
            if mode == "overlap":
                change.mul_(1.0 - alpha)
            new.append((change, block.rows(move)))
        for value, goal in new:
            on.put(value, goal)

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

    def _add_residual(self, update: Tensor, error: Tensor) -> None:
        update.add_(error if self._codec.decay == 1.0 else error * self._codec.decay)

    def _decoded(self, on: Staging, block: _Block, data: Tensor) -> Tensor:
        gradient = torch.empty(block.num_pieces, block.count, device=on.device)
        decode_average(self._codec, on.bring(data), gradient)
        return gradient

    def _blocks(self, most: int) -> Iterator[_Block]:
        first = start = 0
        for count, equal in itertools.groupby(self.counts):
            left, at_once = len(list(equal)), max(1, most // count)
            while left:
                block = _Block(first, min(left, at_once), count, start)
                yield block
                first, left = first + block.num_pieces, left - block.num_pieces
                start += block.num_pieces * count

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(self.counts))


def square_sums(x: Tensor) -> list[float]:
    """The sums of the squares of pieces, [P, N] in fp32; bit for bit the same on every machine."""
    n = x.shape[1]
    lanes = min(_LANES, 1 << max(0, n - 1).bit_length())
    total = torch.zeros(len(x), lanes, dtype=torch.float64, device=x.device)
    for part in torch.split(x, lanes, dim=1):
        wide = part.double()
        # One addition per lane: torch.sum adds in an order that depends on processor and threads.
        total[:, : part.shape[1]].add_(wide.mul_(wide))
    while lanes > 1:
        lanes //= 2
        total = total[:, :lanes] + total[:, lanes:]
    found: list[float] = total[:, 0].tolist()
    return found


def total_norm(square_sums: Sequence[float]) -> float:
    """The norm of all pieces of a fragment, in their order."""
    # fsum is exact, so no order of addition can change a bit.
    return math.sqrt(math.fsum(square_sums))


def clip_scale(norm: float, max_norm: float | None) -> float:
    """Factor that clips a vector of this norm to `max_norm`."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def _ends(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]

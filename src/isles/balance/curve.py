"""Seconds of a rank by the rows of a micro-batch, and the resulting seconds of a split."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from isles.dist.split import RowSplit


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one forward and backward pass on one data-parallel rank.

    Args:
        sizes: measured micro-batch sizes in rows, ascending.
        seconds: seconds for each size, never falling.
        limit: most rows that fit into the rank's memory, or that the run file allows.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    limit: int

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.seconds) >= 1 <= self.limit, self
        assert self.sizes[0] >= 1 and self.seconds[0] > 0, self

    @classmethod
    def of(cls, measured: Mapping[int, float], limit: int) -> Curve:
        """A curve from seconds by rows. Noise only makes a pass slower, so it is removed: fewer
        rows take at most the time of more rows, and of the same rows in smaller parts."""
        sizes = sorted(measured)
        falling = accumulate((measured[size] for size in reversed(sizes)), min)
        seconds = list(falling)[::-1]
        for i, size in enumerate(sizes):
            parts = (-(-size // sizes[k]) * seconds[k] for k in range(i))
            seconds[i] = min((seconds[i], *parts))
        return cls(tuple(sizes), tuple(seconds), limit)

    def time(self, rows: int) -> float:
        """Seconds of a micro-batch. A rank without rows still computes one row.

        Linear between two measured sizes, and extrapolated beyond the largest.
        """
        sizes, seconds = self.sizes, self.seconds
        rows = max(1, rows)
        if len(sizes) == 1 or rows <= sizes[0]:
            return seconds[0] * max(1.0, rows / sizes[0])
        i = min(bisect_left(sizes, rows), len(sizes) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i] + slope * (rows - sizes[i])

    @property
    def rows_per_second(self) -> float:
        """Highest speed at any size within the limit."""
        usable = {min(size, self.limit) for size in self.sizes} | {self.limit}
        return max(size / self.time(size) for size in usable)

    def scaled(self, factor: float) -> Curve:
        """The curve of a rank that is `factor` times as slow."""
        return replace(self, seconds=tuple(seconds * factor for seconds in self.seconds))

    def capped(self, limit: int) -> Curve:
        """The curve of the same rank with at most `limit` rows per micro-batch."""
        return replace(self, limit=max(1, min(self.limit, limit)))

    def record(self) -> dict[str, Any]:
        """The curve for a file. `read` restores it."""
        return {"sizes": list(self.sizes), "seconds": list(self.seconds), "limit": self.limit}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Curve:
        """The curve of a record of `record`."""
        sizes = tuple(int(size) for size in record["sizes"])
        return cls(sizes, tuple(float(s) for s in record["seconds"]), int(record["limit"]))


def slowest(curves: Sequence[Curve]) -> Curve:
    """Curve of ranks that compute every micro-batch together: the slowest rank at each size."""
    sizes = sorted({size for curve in curves for size in curve.sizes})
    seconds = {size: max(curve.time(size) for curve in curves) for size in sizes}
    return Curve.of(seconds, min(curve.limit for curve in curves))


def rank_seconds(split: RowSplit, dp_rank: int, curve: Curve) -> float:
    """Seconds of a rank's computing in one step, without waiting for others."""
    return sum(curve.time(rows) for rows in split.micro_steps(dp_rank))


def step_seconds(split: RowSplit, curves: Sequence[Curve]) -> float:
    """Seconds of one step: the slowest rank's, or the sum of the slowest in each micro-step."""
    ranks = range(len(curves))
    if not split.in_step:
        return max(rank_seconds(split, rank, curves[rank]) for rank in ranks)
    columns = zip(*(split.micro_steps(rank) for rank in ranks), strict=True)
    return sum(
        max(curve.time(rows) for curve, rows in zip(curves, column, strict=True))
        for column in columns
    )

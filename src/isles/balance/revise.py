"""Whether the rows should be dealt anew, from what the ranks were seen to need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isles.config.curve import Curve, rank_seconds, step_seconds
from isles.config.solve import are_alike, fastest_split
from isles.config.split import RowSplit, even_split

_DEVIATION = 0.10
"""A rank that is further off than this is not what it was taken for."""

_LEAST_GAIN = 0.05
"""A new split must save at least this part of a step: less is noise, and rows would flap."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A better split.

    Args:
        split: to be used from the next step on.
        curves: what is now known of the ranks.
        slower: for each rank, how many times as long it needed as was expected, where 1 is the
            rank in the middle.
        gain: how many times as fast a step becomes, by these curves.
    """

    split: RowSplit
    curves: tuple[Curve, ...]
    slower: tuple[float, ...]
    gain: float

    @property
    def reason(self) -> str:
        """The rank that is furthest off, in words."""
        off = [max(factor, 1 / factor) for factor in self.slower]
        rank = off.index(max(off))
        word = "slower" if self.slower[rank] > 1 else "faster"
        return f"data-parallel rank {rank} is {off[rank]:.2f} times {word} than it was taken for"


def choose(
    curves: Sequence[Curve], global_batch_size: int, even_size: int, *, in_step: bool
) -> RowSplit:
    """The split for these ranks: the even one where they are alike, else the fastest.

    Args:
        curves: of each data-parallel rank.
        global_batch_size: rows to deal.
        even_size: micro-batch size of the even split.
        in_step: see RowSplit.
    """
    if are_alike(curves):
        return even_split(global_batch_size, len(curves), even_size, in_step=in_step)
    return fastest_split(curves, global_batch_size, in_step=in_step)


def revise(
    split: RowSplit, curves: Sequence[Curve], measured: Sequence[float], even_size: int
) -> Revision | None:
    """A better split, if what was measured says that there is one.

    Args:
        split: in use.
        curves: by which it was chosen.
        measured: what each rank's own computing took in a step, in any unit.
        even_size: micro-batch size of the even split.
    """
    assert len(measured) == len(curves) == len(split.rows)
    factors = [
        seconds / rank_seconds(split, rank, curves[rank]) for rank, seconds in enumerate(measured)
    ]
    if min(factors) <= 0:
        return None
    # The unit of what was measured is another than the curves': only ratios between ranks count.
    middle = sorted(factors)[(len(factors) - 1) // 2]
    slower = tuple(factor / middle for factor in factors)
    if max(slower) <= (1 + _DEVIATION) * min(slower):
        return None
    scaled = tuple(curve.scaled(by) for curve, by in zip(curves, slower, strict=True))
    better = choose(scaled, split.global_batch_size, even_size, in_step=split.in_step)
    gain = step_seconds(split, scaled) / step_seconds(better, scaled)
    return Revision(better, scaled, slower, gain) if gain > 1 + _LEAST_GAIN else None

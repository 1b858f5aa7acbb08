"""Split of a global batch's rows among the data-parallel ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Rows and micro-steps of each data-parallel rank in one inner step.

    Args:
        rows: rows of the global batch per data-parallel rank, in order; 0 is allowed.
        micro_batch_sizes: largest micro-batch of each data-parallel rank, in rows.
        in_step: whether all ranks must make the same number of micro-steps. Every strategy that
            gathers parameters in the forward pass needs this.
    """

    rows: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    in_step: bool

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.micro_batch_sizes), self
        assert min(self.rows) >= 0 and min(self.micro_batch_sizes) >= 1, self

    @property
    def global_batch_size(self) -> int:
        """Rows of all ranks together."""
        return sum(self.rows)

    def first_row(self, dp_rank: int) -> int:
        """Index of a rank's first row in the global batch."""
        return sum(self.rows[:dp_rank])

    def shortened(self, num_rows: int) -> RowSplit:
        """The same shares of a smaller batch; some ranks may get no row."""
        whole = self.global_batch_size
        assert 0 < num_rows <= whole
        if num_rows == whole:
            return self
        ends = itertools.accumulate(self.rows, initial=0)
        # Whole numbers, so that all ranks compute the same edges.
        edges = [end * num_rows // whole for end in ends]
        rows = tuple(end - start for start, end in itertools.pairwise(edges))
        return RowSplit(rows, self.micro_batch_sizes, self.in_step)

    def micro_steps(self, dp_rank: int) -> tuple[int, ...]:
        """Rows of each micro-step of a rank; one with 0 rows only joins the collectives."""
        rows, size = self.rows[dp_rank], self.micro_batch_sizes[dp_rank]
        if self.in_step:
            # Larger micro-steps come first on every rank, so that slow ones coincide.
            of_ranks = zip(self.rows, self.micro_batch_sizes, strict=True)
            steps = max(1, *(-(-own // most) for own, most in of_ranks))
            least, larger = divmod(rows, steps)
            return (least + 1,) * larger + (least,) * (steps - larger)
        whole, rest = divmod(rows, size)
        # A rank without rows makes one empty micro-step, because the reduction needs every rank.
        return (size,) * whole + ((rest,) if rest or not whole else ())


def even_split(
    global_batch_size: int, dp_size: int, micro_batch_size: int, *, in_step: bool
) -> RowSplit:
    """Equal rows per rank; ranks differ by at most one row."""
    rows = tuple(
        (r + 1) * global_batch_size // dp_size - r * global_batch_size // dp_size
        for r in range(dp_size)
    )
    return RowSplit(rows, (micro_batch_size,) * dp_size, in_step)


def shared_split(
    global_batch_size: int, shares: Sequence[float], limits: Sequence[int], *, in_step: bool
) -> RowSplit:
    """Rows in proportion to shares, rounded; each rank makes few micro-steps of similar size.

    Args:
        global_batch_size: rows to divide.
        shares: share of each data-parallel rank, not all 0.
        limits: largest micro-batch of each data-parallel rank, in rows.
        in_step: see `RowSplit`.
    """
    # Exact, so that equal shares stay equal, and all ranks round alike.
    exact = [Fraction(share) for share in shares]
    wanted = [global_batch_size * share / sum(exact) for share in exact]
    rows = [int(number) for number in wanted]
    by_rest = sorted(range(len(rows)), key=lambda rank: (rows[rank] - wanted[rank], rank))
    for rank in by_rest[: global_batch_size - sum(rows)]:
        rows[rank] += 1
    sizes = [even_size(own, limit) for own, limit in zip(rows, limits, strict=True)]
    return RowSplit(tuple(rows), tuple(sizes), in_step)


def even_size(rows: int, limit: int) -> int:
    """Size of micro-batches that hold `rows` in the fewest micro-steps that the limit allows."""
    steps = max(1, -(-rows // limit))
    return max(1, -(-rows // steps))

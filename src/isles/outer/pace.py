"""How many inner steps lie between two outer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST, MOST = 10, 1000
"""Fewer hardly pay for the outer optimizer; with more, clusters learn too far apart."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """After which inner step each turn is due.

    Args:
        sync_every: inner steps in which every weight is averaged once.
        fragments: turns in that time.
        warmup_rounds: so many rounds come first, of other length.
        warmup_sync_every: inner steps of each of them.
    """

    sync_every: int
    fragments: int
    warmup_rounds: int = 0
    warmup_sync_every: int = 0

    def round_steps(self, turn: int) -> int:
        """Inner steps of the round that a turn belongs to."""
        is_warmup = turn // self.fragments < self.warmup_rounds
        return self.warmup_sync_every if is_warmup else self.sync_every

    def step_of(self, turn: int) -> int:
        """The inner step after which a turn is due."""
        rounds = turn // self.fragments
        short = min(rounds, self.warmup_rounds)
        before = short * self.warmup_sync_every + (rounds - short) * self.sync_every
        place = turn % self.fragments + 1
        return before + place * self.round_steps(turn) // self.fragments


def auto_sync_every(
    *, size_bytes: int, link_bytes_per_s: float, step_s: float, max_overhead: float
) -> int:
    """Inner steps such that waiting for the link costs no more than a part of the time.

    Args:
        size_bytes: what a cluster sends and takes in one round, all fragments together.
        link_bytes_per_s: of the slowest cluster's link, as measured.
        step_s: of an inner step.
        max_overhead: which part of the inner steps' time the link may take.

    Returns:
        Between LEAST and MOST.
    """
    wait_s = size_bytes / link_bytes_per_s
    return max(LEAST, min(MOST, math.ceil(wait_s / (max_overhead * step_s))))

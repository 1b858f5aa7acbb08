"""How many inner steps lie between two outer steps, where the run file leaves it open."""

from __future__ import annotations

import math

LEAST, MOST = 10, 1000
"""Fewer hardly pay for the outer optimizer; with more, clusters learn too far apart."""


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

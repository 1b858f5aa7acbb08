"""Which sample of which endless stream comes when."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from isles.data.order import PERIOD, deal_period, shares
from isles.data.rng import Int64Array

ENDLESS = 2**40
"""Stands for the samples of a stream, which has no last one."""


class StreamOrder:
    """The order of the samples of several endless streams, each read from its first to its last.

    Each run of PERIOD samples holds each stream in proportion to its weight. It depends on the seed
    and the global sample index alone, never on ranks or batches. Shuffling is left to the streams.

    Args:
        weights: shares of the streams.
        seed: another seed is another order.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._slots = np.asarray(shares(weights, PERIOD), np.int64)
        # Two: a batch may lie across the border between periods.
        self._deal = lru_cache(maxsize=2)(lambda n: deal_period(self._slots, seed, n))

    @property
    def samples_per_epoch(self) -> int:
        """More than can be read: an epoch of a mixture of streams never ends."""
        return ENDLESS

    def locate(self, sample_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The stream of each of these samples, and its number within that stream; int64."""
        period, slot = np.divmod(sample_ids, PERIOD)
        source, number = np.empty_like(slot), np.empty_like(slot)
        for each in np.unique(period):
            here = period == each
            sources, ranks = self._deal(int(each))
            source[here] = sources[slot[here]]
            number[here] = ranks[slot[here]] + each * self._slots[source[here]]
        return source, number

    def before(self, sample_id: int) -> list[int]:
        """How many samples of each stream come before this one."""
        period, slot = divmod(sample_id, PERIOD)
        sources, _ = self._deal(period)
        counts = np.bincount(sources[:slot], minlength=len(self._slots))
        return [int(n) for n in counts + period * self._slots]

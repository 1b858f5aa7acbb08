"""The order of the samples: index arithmetic on the seed and the sample index only.

Random numbers depend on a key and a counter (`key_from`, `draw`), `permute` shuffles without
holding the order in memory, and `SampleOrder` interleaves the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
UInt64Array = npt.NDArray[np.uint64]

PERIOD = 65_536
"""Number of samples after which every weighted source has exactly its share."""

ENDLESS = 2**40
"""Number of samples of a stream, which is endless."""

_ROUNDS = 4  # enough by Luby and Rackoff 1988; more would only cost time
_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def scramble(values: UInt64Array) -> UInt64Array:
    """A fixed bijection of uint64 that makes neighboring numbers look unrelated.

    Source: splitmix64, Steele, Lea and Flood 2014 (doi:10.1145/2660193.2660195).
    """
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def key_from(seed: int, *parts: int | Int64Array) -> UInt64Array:
    """Keys (uint64) of independent streams of random numbers: for the seed and each of the parts.

    The result has the broadcast shape of the parts (at least one element).
    """
    key = scramble(np.array([seed & _MASK], dtype=np.uint64))
    for part in parts:
        numbers = np.atleast_1d(np.asarray(part, dtype=np.int64)).view(np.uint64)
        key = scramble(key ^ scramble(numbers))
    return key


def draw(key: UInt64Array, counter: Int64Array) -> UInt64Array:
    """The numbers of the key's stream at these places; key and counter broadcast."""
    return scramble(key + counter.view(np.uint64) * _GOLDEN)


def permute(index: Int64Array, n: int, key: UInt64Array) -> Int64Array:
    """The place of each index (int64) in a random order of 0..n-1, n at most 2**62.

    A Feistel network over the next power of two, repeated until the result is below n (cycle
    walking), so the order is never in memory. There is one key, or one for each index; each key
    gives another order.

    Source: Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains, section 5.
    """
    assert 1 <= n <= 2**62
    bits = max(2, (n - 1).bit_length())
    keys = np.broadcast_to(key, index.shape)
    placed = _feistel(index, bits, keys)
    outside = np.flatnonzero(placed >= n)
    while outside.size:
        placed[outside] = _feistel(placed[outside], bits, keys[outside])
        outside = outside[placed[outside] >= n]
    return placed


def _feistel(values: Int64Array, bits: int, keys: UInt64Array) -> Int64Array:
    low_bits = bits // 2
    low_mask, high_mask = 2**low_bits - 1, 2 ** (bits - low_bits) - 1
    low, high = values & low_mask, values >> low_bits
    for number in range(_ROUNDS):
        round_keys = keys + np.uint64(number << 32)
        # The top bits of the draw are as good as the low ones, and stay positive as int64.
        if number % 2:
            low ^= (draw(round_keys, high) >> np.uint64(1)).view(np.int64) & low_mask
        else:
            high ^= (draw(round_keys, low) >> np.uint64(1)).view(np.int64) & high_mask
    joined: Int64Array = (high << low_bits) | low
    return joined


def shares(weights: Sequence[float], slots: int) -> list[int]:
    """Slots in proportion to the weights: largest remainder, at least one each."""
    assert 0 < len(weights) <= slots
    total = sum(weights)
    exact = [weight / total * slots for weight in weights]
    given = [max(1, int(share)) for share in exact]
    by_want = sorted(range(len(weights)), key=lambda i: given[i] - exact[i])
    for i in range(slots - sum(given)):
        given[by_want[i % len(given)]] += 1
    while sum(given) > slots:  # the largest source pays for tiny sources
        given[given.index(max(given))] -= 1
    return given


class SampleOrder:
    """The endless order of the samples of several sources.

    It depends on the seed and the global sample index alone, never on ranks or batches.
    Without weights, an epoch has every sample of every source once. With weights, each run of
    PERIOD samples has each source in proportion, and each source has its own epochs.

    Args:
        sizes: samples in each source; all positive. None: the sources are endless streams, each
            read from its first sample on, in the stream's order.
        weights: shares of the sources; None: no weights.
    """

    def __init__(
        self, sizes: Sequence[int] | None, weights: Sequence[float] | None, seed: int
    ) -> None:
        self._sizes = None if sizes is None else np.asarray(sizes, dtype=np.int64)
        assert self._sizes is None or (self._sizes.size and (self._sizes > 0).all()), sizes
        assert weights is not None or sizes is not None, "streams have no sizes to go by"
        self._seed = seed
        self._slots = None if weights is None else np.asarray(shares(weights, PERIOD), np.int64)
        # Two, because a batch may span two periods.
        self._period = lru_cache(maxsize=2)(self._order_period)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of all sources; for streams, more than a run can read."""
        return ENDLESS if self._sizes is None else int(self._sizes.sum())

    def locate(self, sample_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The source of each global index, and the sample within that source; int64."""
        if self._slots is None:
            return self._locate_in_epoch(sample_ids)
        return self._locate_by_weight(sample_ids)

    def _locate_in_epoch(self, sample_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        assert self._sizes is not None
        total, ends = self.samples_per_epoch, np.cumsum(self._sizes)
        epoch, place = np.divmod(sample_ids, total)
        chosen = permute(place, total, key_from(self._seed, 0, epoch))
        source = np.searchsorted(ends, chosen, side="right").astype(np.int64)
        return source, chosen - (ends[source] - self._sizes[source])

    def _locate_by_weight(self, sample_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        assert self._slots is not None
        period, slot = np.divmod(sample_ids, PERIOD)
        source, drawn = np.empty_like(slot), np.empty_like(slot)
        for number in np.unique(period):
            here = period == number
            sources, ranks = self._period(int(number))
            source[here] = sources[slot[here]]
            drawn[here] = ranks[slot[here]] + number * self._slots[source[here]]
        if self._sizes is None:
            return source, drawn
        sample = np.empty_like(slot)
        for k in np.unique(source):
            here = source == k
            size = int(self._sizes[k])
            epoch, place = np.divmod(drawn[here], size)
            sample[here] = permute(place, size, key_from(self._seed, 1, int(k), epoch))
        return source, sample

    def _order_period(self, period: int) -> tuple[Int64Array, Int64Array]:
        # For each place in one period: its source, and how many earlier ones that source has.
        assert self._slots is not None
        ends = np.cumsum(self._slots)
        chosen = permute(np.arange(PERIOD), PERIOD, key_from(self._seed, 2, period))
        sources = np.searchsorted(ends, chosen, side="right").astype(np.int64)
        # Stable: `ranks` counts the earlier places of the same source.
        by_source = np.argsort(sources, kind="stable")
        ranks = np.empty(PERIOD, dtype=np.int64)
        ranks[by_source] = np.arange(PERIOD) - np.repeat(ends - self._slots, self._slots)
        return sources, ranks

"""Random numbers that depend on a key and a counter alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
UInt64Array = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def scramble(values: UInt64Array) -> UInt64Array:
    """A fixed bijection of the 64-bit numbers after which neighbours look unrelated.

    Args:
        values: uint64, at least one dimension.

    Source: splitmix64, Steele, Lea and Flood 2014 (doi:10.1145/2660193.2660195).
    """
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def key_from(seed: int, *parts: int | Int64Array) -> UInt64Array:
    """Keys of independent streams of random numbers: one for each seed and each of the parts.

    Returns:
        uint64, of the shape to which the parts broadcast (at least one element).
    """
    key = scramble(np.array([seed & _MASK], dtype=np.uint64))
    for part in parts:
        numbers = np.atleast_1d(np.asarray(part, dtype=np.int64)).view(np.uint64)
        key = scramble(key ^ scramble(numbers))
    return key


def draw(key: UInt64Array, counter: Int64Array) -> UInt64Array:
    """The numbers of the key's stream at these places; key and counter broadcast."""
    return scramble(key + counter.view(np.uint64) * _GOLDEN)

"""A limit on bytes per second, shared by all connections that ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_BURST_S = 0.05


class RateLimit:
    """Lets bytes pass at a rate, in the order in which they ask.

    Args:
        bytes_per_s: the rate; 0: no limit. It may be changed at any time.
        clock: seconds that only grow; left out, the event loop's.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    def delay(self, num_bytes: int) -> float:
        """Count bytes in; seconds until they may pass."""
        if self.bytes_per_s <= 0:
            return 0.0
        now = self._clock() if self._clock else asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - _BURST_S) + num_bytes / self.bytes_per_s
        return max(0.0, self._free_at - now)

"""Limits for the number and time of connections without the run's token."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")

MOST, MOST_EACH = 256, 64
"""Limits for all addresses together and for each. A client shows its token within milliseconds."""
WITHIN_S = 10.0


def network(address: object) -> str:
    """Owner of an address, as an IPv6 site has 2^64 addresses."""
    try:
        found = ipaddress.ip_address(str(address).partition("%")[0])
    except ValueError:
        return str(address)
    if found.version == 6:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class Unauthenticated(Generic[C]):
    """Unauthenticated connections of one server, by address. Any thread may call.

    Each address has a low limit, so no single address can displace connections of others.

    Args:
        end: ends a connection. Called for a connection above a limit, and by `look`.
        most: connections that may wait at a time.
        most_each: connections of one address that may wait at a time.
        within_s: time in which a connection must show its token, seconds.
        clock: a monotonic clock, seconds.
    """

    def __init__(
        self,
        end: Callable[[C], None],
        *,
        most: int = MOST,
        most_each: int = MOST_EACH,
        within_s: float = WITHIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._most, self._most_each = end, most, most_each
        self._within_s, self._clock = within_s, clock
        self._owners: dict[C, str] = {}
        self._since: dict[str, dict[C, float]] = {}  # by owner, oldest first
        self._lock = threading.Lock()

    def add(self, connection: C, address: object) -> None:
        """Add a connection. Above a limit, end the oldest connection of the address with the
        most."""
        owner, oldest = network(address), None
        with self._lock:
            self._owners[connection] = owner
            own = self._since.setdefault(owner, {})
            own[connection] = self._clock()
            if len(self._owners) > self._most:
                own = max(self._since.values(), key=len)
            if len(own) > self._most_each or len(self._owners) > self._most:
                oldest = next(iter(own))
                self._remove(oldest)
        if oldest is not None:
            self._end(oldest)

    def forget(self, connection: C) -> bool:
        """Remove a connection that has shown its token or closed. Returns whether it was
        waiting."""
        with self._lock:
            return self._remove(connection)

    def look(self) -> None:
        """End the connections that have waited too long."""
        now = self._clock()
        with self._lock:
            waiting = [item for own in self._since.values() for item in own.items()]
            late = [connection for connection, since in waiting if now - since > self._within_s]
            for connection in late:
                self._remove(connection)
        for connection in late:
            self._end(connection)

    def _remove(self, connection: C) -> bool:
        owner = self._owners.pop(connection, None)
        if owner is None:
            return False
        own = self._since[owner]
        del own[connection]
        if not own:
            del self._since[owner]
        return True

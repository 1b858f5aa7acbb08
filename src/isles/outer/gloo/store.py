"""How the members of an epoch tell gloo of one another: a store that the rendezvous keeps.

It goes through the same TLS and token as all else, so no other port is open and nobody else can
meddle. Imports torch: for the side process only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from isles.errors import CommunicationError
from isles.outer.client.client import Client


class EpochStore(Store):
    """A torch store for one epoch. To be used from other threads than the client's loop.

    Args:
        client: of the cluster.
        loop: the client's event loop, which runs in another thread.
        epoch: number of the epoch.
        timeout_s: for how long a value is waited for.
    """

    def __init__(
        self, client: Client, loop: asyncio.AbstractEventLoop, epoch: int, timeout_s: float
    ) -> None:
        super().__init__()
        self._client = client
        self._loop = loop
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Tell all members something."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        asyncio.run_coroutine_threadsafe(
            self._client.put_value(self._epoch, key, data, self._timeout_s), self._loop
        ).result()

    def get(self, key: str) -> bytes:
        """What a member has told; waits for it.

        Raises:
            CommunicationError: nobody has by the deadline.
        """
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until members have told all of these.

        Raises:
            CommunicationError: nobody has by the deadline.
        """
        end = time.monotonic() + (timeout.total_seconds() if timeout else self._timeout_s)
        for key in keys:
            if key in self._known:
                continue
            value = asyncio.run_coroutine_threadsafe(
                self._client.get_value(self._epoch, key, end - time.monotonic()), self._loop
            ).result()
            if value is None:
                raise CommunicationError(
                    f"a member of epoch {self._epoch} has not told its address in time",
                    where=f"key {key}",
                    fix="look at the logs of the other clusters",
                )
            self._known[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether members have told all of these already."""
        for key in keys:
            if key not in self._known:
                value = asyncio.run_coroutine_threadsafe(
                    self._client.get_value(self._epoch, key, 0.0), self._loop
                ).result()
                if value is None:
                    return False
                self._known[key] = value
        return True

    def has_extended_api(self) -> bool:
        """No append, no multi-get."""
        return False

    @property
    def timeout(self) -> timedelta:
        """For how long a value is waited for."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait for so long from now on."""
        self._timeout_s = timeout.total_seconds()

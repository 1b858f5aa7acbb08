"""The seam between the side process and the ways in which an average comes about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from isles.errors import CommunicationError
from isles.outer.client.http import RendezvousRefusal
from isles.outer.link.messages import Contribute
from isles.outer.link.settings import LinkSettings

log = logging.getLogger(__name__)

R = TypeVar("R")

_AGAIN_S = 0.5
_ON_THE_WIRE = 1.05
"""Bytes on the wire for each of a file: TLS, HTTP and TCP have theirs."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a contribution has cost.

    Args:
        sent_bytes: to the rendezvous or to other clusters.
        received_bytes: from them.
        seconds: that it took, without waiting for others.
    """

    sent_bytes: int
    received_bytes: int
    seconds: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.seconds + other.seconds,
        )


class Exchange(Protocol):
    """One way of averaging."""

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent to other clusters directly, and received from them."""
        ...

    async def take_part(self, part: Contribute) -> Traffic:
        """Bring a contribution into its turn; tried for as long as it takes.

        Where the average then lies in the spool already, it is not fetched from the rendezvous.
        May be cancelled at any time, and called again with the same contribution.

        Raises:
            RendezvousRefusal: it cannot be in the turn any more, or must not.
        """
        ...

    async def close(self) -> None:
        """Let everything go."""
        ...


def limited(settings: LinkSettings) -> LinkSettings:
    """With limits that are kept on the wire."""
    return replace(
        settings,
        up_bytes_per_s=settings.up_bytes_per_s / _ON_THE_WIRE,
        down_bytes_per_s=settings.down_bytes_per_s / _ON_THE_WIRE,
    )


async def patiently(call: Callable[[], Awaitable[R]]) -> R:
    """Do something for as long as it takes.

    Raises:
        RendezvousRefusal: the rendezvous says no.
    """
    while True:
        try:
            return await call()
        except RendezvousRefusal:
            raise
        except CommunicationError as error:
            log.info("%s", error.what)
            await asyncio.sleep(_AGAIN_S)

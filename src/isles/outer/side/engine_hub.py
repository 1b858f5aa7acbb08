"""Engine hub: all bytes go through the rendezvous, to which every cluster only dials out."""

from __future__ import annotations

import asyncio

from isles.outer.client.client import Client
from isles.outer.link.messages import Contribute
from isles.outer.side.engine import Traffic, patiently

_DEADLINE_S = 3600.0


class HubExchange:
    """Uploads contributions in chunks; what had arrived before a cut or a crash is not sent again.

    Args:
        client: for data.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._turn = asyncio.Lock()

    @property
    def moved(self) -> tuple[int, int]:
        """See `Exchange`."""
        return 0, 0

    async def take_part(self, part: Contribute) -> Traffic:
        """See `Exchange`."""
        loop = asyncio.get_running_loop()
        # One after the other: the turn that is committed first gets the whole line.
        async with self._turn:
            started, sent = loop.time(), self._client.channel.sent_bytes
            await patiently(
                lambda: self._client.contribute(
                    part.turn,
                    part.path,
                    tokens=part.tokens,
                    steps=part.inner_steps,
                    samples=part.samples,
                    deadline_s=_DEADLINE_S,
                )
            )
            sent = self._client.channel.sent_bytes - sent
            return Traffic(sent, 0, loop.time() - started)

    async def close(self) -> None:
        """See `Exchange`."""

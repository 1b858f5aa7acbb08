"""Engine hivemind: no rendezvous to be started; clusters find and reach one another over libp2p."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isles.outer.client.client import Client
from isles.outer.gloo.engine import GlooExchange
from isles.outer.gloo.group import Group
from isles.outer.hivemind.group import StreamGroup
from isles.outer.hivemind.node import Node
from isles.outer.link.messages import Contribute, Member
from isles.outer.link.settings import LinkSettings
from isles.outer.messages import EpochAnswer
from isles.outer.side.engine import Exchange, Traffic, patiently
from isles.outer.side.engine_hub import HubExchange
from isles.outer.side.spool import Spool

_ASK_S, _AGAIN_S = 30.0, 0.5


class HivemindExchange(GlooExchange):
    """Epochs, pieces, hashes and commits are those of engine gloo; the streams are libp2p's.

    hivemind's own averager is not used. It sends each peer the difference to that peer's tensor,
    each rounded by itself, so that no two peers get the same bits, and reports success where a
    peer has died in the middle.

    Args:
        node: this cluster among its peers.
        clients: whose answers must be in this cluster's copy of the book before they are believed.
        member, settings, spool, warn: see `GlooExchange`.
    """

    def __init__(
        self,
        node: Node,
        clients: tuple[Client, Client],
        member: Member,
        settings: LinkSettings,
        spool: Spool,
        warn: Callable[[str], None],
    ) -> None:
        relay = _Relay(node, clients[1], self)
        super().__init__(clients[0], relay, member, settings, spool, warn)
        self._node = node
        for client in clients:
            client.channel.witness = node

    def _make_group(self, loop: asyncio.AbstractEventLoop, epoch: EpochAnswer) -> Group:
        return StreamGroup(self._node, loop, epoch, self._settings.timeout_s, self._pace)

    async def close(self) -> None:
        """See `Exchange`."""
        await self._node.close()


class _Relay(HubExchange):
    """Turns through the cluster that hosts the rendezvous, for those who do not get together.

    What it has been sent is gone with it, so each stays with its turn until that is committed.
    """

    def __init__(self, node: Node, client: Client, whole: Exchange) -> None:
        super().__init__(client)
        self._node, self._client, self._whole = node, client, whole

    async def take_part(self, part: Contribute) -> Traffic:
        """See `Exchange`."""
        mark = self._node.mark()
        traffic = await super().take_part(part)
        while True:
            answer = await patiently(lambda: self._client.turn(part.turn, _ASK_S))
            if answer.state == "committed":
                return traffic
            if self._node.mark() != mark:
                return traffic + await self._whole.take_part(part)
            await asyncio.sleep(_AGAIN_S)

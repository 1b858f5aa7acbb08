"""Which cluster hosts the rendezvous: decided by each from what the others say, without clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a cluster says of itself, again and again.

    Args:
        name: of the cluster.
        term: counts hosts up; that of the host it follows.
        host: the peer that it follows; itself where it hosts; empty: nobody.
        turn: the next to be committed, as its copy of the book says.
        changes: of its copy; see `Copy`.
    """

    name: str
    term: int = 0
    host: str = ""
    turn: int = 0
    changes: int = -1

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Hello:
        """What `asdict` gave, among other things."""
        return cls(
            name=str(body["name"]),
            term=int(body["term"]),
            host=str(body["host"]),
            turn=int(body["turn"]),
            changes=int(body["changes"]),
        )

    def body(self) -> dict[str, Any]:
        """To be sent."""
        return asdict(self)


def choose(
    me: str, own: Hello, others: Mapping[str, Hello], *, at_least: int, is_settled: bool
) -> str:
    """The peer to follow; this one itself: host; empty: nobody yet.

    Two may host for a while after a network was cut: whose history has come less far steps down.

    Args:
        me: this peer.
        own: what it says.
        others: what was heard not long ago, by peer.
        at_least: so many clusters, this one too, must be heard before one begins to host.
        is_settled: this cluster has listened long enough to have heard of a host.
    """
    everybody = {me: own, **others}
    hosts = {peer for peer, hello in everybody.items() if hello.host == peer}
    if hosts:
        first = max(hosts, key=lambda peer: (everybody[peer].turn, everybody[peer].term, peer))
        return own.host if own.host in hosts and own.host != me else first
    if not is_settled or len(everybody) < at_least:
        return ""
    # The newest copy of the book knows all that any of these has acted upon.
    first = max(everybody, key=lambda peer: (everybody[peer].turn, everybody[peer].changes, peer))
    return me if first == me else ""

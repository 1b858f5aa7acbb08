"""How a cluster's side process reaches the others: what rank 0 tells it once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["hub", "gloo", "hivemind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HivemindSettings:
    """How the side process finds the others without a rendezvous of their own.

    Args:
        run: name of the run.
        rules: of the run, as a rendezvous is told (`isles.outer.hub.settings`).
        initial_peers: multiaddresses of peers to begin with; none: the others begin with this one.
        host_maddrs: where it listens.
        announce_maddrs: what it tells the others, where that is something else.
        identity_path: private key; None: one is made and kept in the spool.
        secret_file: holds what all clusters of the run share; None: anybody may come.
        relay: reach others, and be reached, through public or other relays.
        nat: ask the router to let others in.
    """

    run: str
    rules: dict[str, str | int | float]
    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    identity_path: str | None = None
    secret_file: str | None = None
    relay: bool = False
    nat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How the side process reaches the others.

    Args:
        engine: hub: all bytes through the rendezvous. gloo: directly between the clusters.
            hivemind: as gloo, over libp2p, and the rendezvous is in one of the clusters.
        connections: so many chunks travel to or from the rendezvous at a time.
        up_bytes_per_s: limit on what is sent, as it is on the wire; 0: none.
        down_bytes_per_s: limit on what is fetched from the rendezvous; 0: none.
        interface: gloo: network interface by which the others reach this one; None: the one by
            which it reaches the rendezvous.
        timeout_s: gloo: so long may a slice of a few MB take.
        keep_averages: gloo: so many averages are kept here for clusters that missed them.
        beat_s: between two signs of life.
        frozen_s: a side process that has said nothing for so long is ended, and started again.
        hivemind: for that engine.
    """

    engine: Engine = "hub"
    connections: int = 4
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    interface: str | None = None
    timeout_s: float = 60.0
    keep_averages: int = 8
    beat_s: float = 2.0
    frozen_s: float = 30.0
    hivemind: HivemindSettings | None = None

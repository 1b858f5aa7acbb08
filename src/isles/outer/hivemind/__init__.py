"""Engine hivemind: an address book, and a tunnel to the hub of an elected cluster.

`dht.py` finds other clusters and carries streams to those that know the common secret, `host.py`
agrees with them on who hosts the hub, and hosts it. Open `host.py` first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HivemindSettings:
    """How a cluster finds the others without a hub that was started for them.

    Args:
        rules: of the run, as a hub is told (`isles.outer.hub.rules.Settings`).
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

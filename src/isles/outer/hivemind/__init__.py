"""Engine hivemind: an address book, and a tunnel to the hub of an elected cluster.

`dht.py` finds other clusters and carries streams to those that know the common secret, `host.py`
agrees with them on who hosts the hub, and hosts it. Open `host.py` first.
"""

from __future__ import annotations

from isles.config.sections.outer import HivemindConfig


class HivemindSettings(HivemindConfig):
    """How a cluster finds the others without a hub that was started for them."""

    run: str
    """The run's name."""

    rules: dict[str, str | int | float]
    """Of the run, as a hub is told (`isles.outer.hub.rules.Settings`)."""

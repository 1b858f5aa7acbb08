"""Engine hivemind: an address book, and a tunnel to the hub of an elected cluster.

`dht.py` finds other clusters and carries streams to clusters that know the common secret. `host.py`
elects the cluster that hosts the hub, and hosts it. Open `host.py` first.
"""

from __future__ import annotations

from isles.config.sections.outer import HivemindConfig


class HivemindSettings(HivemindConfig):
    """Settings of a cluster that finds the others without a separately started hub."""

    run: str
    """The run's name."""

    rules: dict[str, str | int | float]
    """Settings of the run (`isles.outer.hub.rules.Settings`)."""

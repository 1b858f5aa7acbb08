"""Engine hivemind: an address book, and a tunnel to the hub of an elected cluster.

`dht.py` finds other clusters and carries streams to those that know the common secret, `host.py`
agrees with them on who hosts the hub, and hosts it. Open `host.py` first.
"""

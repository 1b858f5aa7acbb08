"""Engine hivemind: an address book, and a tunnel to the hub of an elected cluster.

`peers.py` finds other clusters by the DHT and carries streams, `keys.py` has what follows from
their common secret, `node.py` agrees with them on who hosts the hub, and hosts it. Open `node.py`
first.
"""

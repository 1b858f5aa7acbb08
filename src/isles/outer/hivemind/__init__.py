"""Engine hivemind: an address book, and a tunnel to the hub of an elected cluster.

`peers.py` finds other clusters by the DHT, `node.py` agrees with them on who hosts the hub,
`host.py` hosts it, `tunnel.py` leads there. Open `node.py` first.
"""

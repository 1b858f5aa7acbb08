"""Averaging between clusters, every N inner steps (DiLoCo).

The algorithm: `diloco.py` has a fragment's pseudo-gradient and outer step, `cluster.py` spreads
fragments over the ranks, `layout.py` assigns weights to fragments, `codec.py` encodes an update,
and `average.py` averages. `messages.py` has the messages on the wire. Clusters average through one
server (`hub/`); rank 0 of each cluster talks to it in a thread (`client/`). With engine hivemind,
one of the clusters runs the hub, and the others find and reach it over libp2p (`hivemind/`). With
engine bucket there is no server: the hub's memory is in object storage (`bucket/`). `trainer/` is
the work of the ranks between two inner steps. Open `diloco.py` first.
"""

"""Between clusters: updates are averaged every so many steps (DiLoCo).

The algorithm: `diloco.py` has a fragment's pseudo-gradient and outer step, `cluster.py` spreads
fragments over the ranks, `layout.py` says which weights are in which, `codec.py` encodes an update
and `average.py` averages. What travels is in `messages.py`. Clusters average through one server
(`hub/`); rank 0 of each speaks with it in a thread (`client/`). With engine hivemind the hub is in
one of the clusters, which the others find and reach over libp2p (`hivemind/`); with engine bucket
there is none, and its memory is in object storage (`bucket/`). `trainer/` is what the ranks do
between two inner steps. Open `diloco.py` first.
"""

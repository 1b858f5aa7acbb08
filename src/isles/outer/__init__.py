"""Between clusters: updates are averaged every so many steps (DiLoCo).

The algorithm: `diloco.py` has a fragment's pseudo-gradient and outer step, `cluster.py` spreads
fragments over the ranks, `layout.py` says which weights are in which, `codec/` encodes an update
and `average.py` averages. What travels is in `messages.py`. The hub through which clusters
average is `hub/`, a cluster's end of it `client/`; rank 0 speaks to a process beside it (`link/`,
`side/`), which uses the engine of the run: the hub, `gloo/` or `hivemind/`. Open `diloco.py`
first.
"""

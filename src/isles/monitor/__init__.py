"""Looking at runs, following and stopping them.

`verbs.py` has the commands, `results.py` those on checkpoints and models. `status.py` reads the
status of a run from its records, `remote.py` asks other machines for it, `table.py` prints it.
`follow.py` has the loop that follows a run, `outcome.py` prints how an attempt ended and its root
cause, `stop.py` stops runs, `logs.py` and `stream.py` print the output of ranks. A multi-cluster
run is a parent with children (`children.py`): `multi_cluster.py` starts and follows them,
`clusters.py` shows and stops them. `hub.py` shows a hub that `isles hub` has opened. Start with
`verbs.py`.
"""

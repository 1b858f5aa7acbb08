"""The live state of a run, for `isles top` and `isles dashboard`.

`snapshot.py` makes a `Snapshot` (`model.py`) from the records of a run: `attempts/N/live.json`,
which the coordinator writes from the samples of all agents, status.json and metrics.jsonl.
`multi_cluster.py` joins the snapshots of all clusters and the answers of the hub. `source.py` gives
a new snapshot every two seconds, also for a run on another machine, over ssh (`readers.py`).
`top.py` draws the snapshot in a terminal, `cells.py` prints it as text, `server.py` serves it to
the page in `page/`. Start with `model.py`.
"""

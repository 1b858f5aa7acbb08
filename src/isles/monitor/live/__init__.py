"""A run as it is now: `isles top`, `isles dashboard`, and what both show.

`snapshot.py` makes a `Snapshot` (`model.py`) from the records of a run: `attempts/N/live.json`,
which the coordinator writes from the samples of all agents, status.json and metrics.jsonl.
`several.py` makes one of those of all clusters and the answers of the hub. `source.py` gives a new
one every two seconds, also of a run on another machine, by ssh (`readers.py`). `top.py` draws them
in a terminal, `cells.py` as lines of text, `server.py` serves them to the page in `page/`. Begin
with `model.py`.
"""

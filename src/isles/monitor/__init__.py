"""Looking at runs, following and stopping them: `isles status`, `logs`, `stop` and the foreground.

`verbs.py` has the commands, `results.py` those on checkpoints and models. `status.py` reads how a
run stands from its records, `remote.py` asks other machines, `table.py` prints it; `follow.py`
has the one loop that follows a run, `ending.py` tells how it ended; `logs.py` and `stream.py` show
what ranks printed. A run on several clusters is a parent with children: `multi_cluster.py` does
each verb with all of them (`children.py`), `clusters.py` shows how they stand; `hub.py` is their
hub where it was opened by itself. Open `verbs.py` first.
"""

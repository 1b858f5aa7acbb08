"""Looking at runs, following and stopping them: `isles status`, `logs`, `stop` and the foreground.

`verbs.py` has the commands. `collect.py` reads what a run directory and a queue say of a run,
`table.py` prints it; `foreground.py` follows a run that was started here, `follow_remote.py` one
on another machine; `ending.py` says how it ended. `multi_cluster/` does the same for a run of
several clusters. Open `verbs.py` first.
"""

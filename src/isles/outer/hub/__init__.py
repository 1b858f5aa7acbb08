"""The hub, the server that averages the clusters' weights.

`routes.py` receives a request and passes it to `core.py`, which decides with `members.py`,
`rounds.py`, `samples.py` and `states.py`; all their data is in the `journal.py`. `work.py` averages
in a separate thread, `files.py` has the files, `server.py` listens. Open `core.py` first.
"""

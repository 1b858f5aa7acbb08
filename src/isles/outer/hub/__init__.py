"""The hub, the server through which clusters average.

A request comes in by `routes.py` and is put to `core.py`, which decides with `members.py`,
`rounds.py`, `samples.py` and `states.py`; all that they know is in the `journal.py`. `work.py`
averages beside that, `files.py` has the files, `server.py` listens. Open `core.py` first.
"""

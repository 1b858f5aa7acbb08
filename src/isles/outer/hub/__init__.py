"""The server through which clusters average.

A request comes in by `routes.py` and is put to `core.py`, which decides with `members.py`,
`turns.py`, `parts.py`, `samples.py` and `states.py`; all that they know is in the `journal.py`.
`work.py` averages beside that, `server.py` listens. Open `core.py` first.
"""

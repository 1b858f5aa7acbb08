"""Rank 0's end of the hub: HTTPS, files that go on where they were cut off.

Rank 0 calls `link.py`, whose thread runs the `session.py`: it joins, gives heartbeats, and follows
the turns (`turns.py`). Files lie in the `spool.py`; what rank 0 hears is in `events.py`. Requests
are made by `client.py`, over `http.py` and `files.py`. Open `link.py` first.
"""

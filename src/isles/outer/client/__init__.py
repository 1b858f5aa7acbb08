"""Rank 0's end of the hub: HTTPS, files that go on where they were cut off.

Rank 0 calls `client.py`, whose thread runs the `session.py`: it joins, gives heartbeats, and
follows the averages (`transfer.py`). Requests are made by `api.py` over `http.py`. Open `client.py`
first.
"""

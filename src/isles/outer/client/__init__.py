"""Rank 0's end of the hub: HTTPS, files that go on where they were cut off.

Rank 0 calls `client.py`, whose thread joins the hub, again and again. While this cluster is a
member, `session.py` sends contributions and heartbeats and follows the averages; files lie in
`spool.py`. Requests are made by `api.py` over `http.py`. Open `client.py` first.
"""

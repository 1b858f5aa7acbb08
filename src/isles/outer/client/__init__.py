"""Rank 0's client of the hub: HTTPS, and resumable file transfers.

Rank 0 calls `client.py`, whose thread joins the hub, and rejoins it when needed. While this cluster
is a member, `session.py` sends contributions and heartbeats and follows the averages; files are in
`spool.py`. `meeting.py` has the protocol of a place where clusters meet. `api.py` implements it for
a separate hub, over `http.py`. Open `client.py` first.
"""

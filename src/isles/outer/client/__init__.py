"""Rank 0's client of the hub: HTTPS, and resumable file transfers.

Rank 0 calls `client.py`, whose thread joins the hub, and rejoins it when needed. While this cluster
is a member, `session.py` sends contributions and heartbeats and follows the averages; files are in
`spool.py`. `meeting.py` says what a place where clusters meet must do; for a separate hub, `api.py`
does it over `http.py`. Open `client.py` first.
"""

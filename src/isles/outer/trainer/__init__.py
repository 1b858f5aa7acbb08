"""The ranks' side of an outer step.

The training loop calls `outer.py` after each inner step. Rank 0 decides (`sync.py`). Its commands
go to all ranks, and these contribute, apply averages and exchange state (`step.py`). `build.py`
creates these objects. Open `outer.py` first.
"""

"""The ranks' side of an outer step.

`outer.py` is what the training loop calls after each inner step. Rank 0 decides (`sync.py`), its
commands go to all ranks, and these contribute, apply averages and exchange state (`step.py`).
`build.py` makes all of it. Open `outer.py` first.
"""

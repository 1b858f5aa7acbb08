"""Unequal GPUs, equal time: the ranks are measured, and rows are dealt by their speed.

A `curve.py` says how long a rank needs for how many rows, and `solve.py` finds the fastest split.
`calibrate.py` measures unequal devices before the first step, `meter.py` times the blocks of each
step; `revise.py` decides from that whether rows are dealt anew, and `history.py` keeps every
decision, so that a resume deals as before. Open `balancer.py` first.
"""

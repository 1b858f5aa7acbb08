"""Unequal GPUs, equal time: ranks are measured, and rows are split by their speed.

A `curve.py` says how long a rank needs for how many rows, and `solve.py` finds the fastest split.
`measure.py` measures unequal devices before the first step, and times the blocks of each step;
`revise.py` decides from that whether the split is revised, and keeps every decision, so that a
resumed run splits as before. Open `balancer.py` first.
"""

"""Balance of unequal GPUs: ranks are measured, and rows are split by their speed.

`curve.py` has the seconds of a rank by its number of rows, and `solve.py` finds the fastest split.
`measure.py` measures unequal devices before the first step, and times the blocks of each step.
`gpus.py` reads whether a GPU is throttled. `revise.py` decides from these measurements whether to
revise the split, and keeps every decision, so that a resumed run splits as before. Open
`balancer.py` first.
"""

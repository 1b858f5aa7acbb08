"""A user's own training script in place of the built-in trainer.

`run.py` starts it as a rank, forwards stops and records how it ended; `main.py` is what Python runs
in the script's process; `report.py` is `isles.report`. `watch.py`, in the coordinator, notices that
it hangs, and has the agents read its stacks (`stacks.py`).
"""

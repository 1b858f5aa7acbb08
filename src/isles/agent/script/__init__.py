"""A user's own training script instead of the built-in trainer.

`run.py` starts it as a rank, forwards stop requests and records its end. `main.py` runs in the
script's process. `report.py` is `isles.report`. `watch.py`, in the coordinator, detects that the
script hangs, and has the agents read its stacks (`stacks.py`).
"""

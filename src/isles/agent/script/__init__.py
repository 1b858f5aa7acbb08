"""A user's own training script in place of the built-in trainer.

`run.py` starts it as a rank, forwards stops and records how it ended; `main.py` is what Python runs
in the script's process. `watch.py` notices that it hangs and reads its stacks; `report.py` is
`isles.report` and the status beside it.
"""

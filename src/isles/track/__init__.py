"""Where curves go: metrics.jsonl always, and TensorBoard, W&B or MLflow.

A row of numbers goes to each tracker. metrics.jsonl is the complete record; `base.py` is the seam,
and keeps those that may be slow behind a thread, so that none stops or slows training. Open
`base.py` first.
"""

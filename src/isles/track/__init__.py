"""Where curves go: metrics.jsonl always, and TensorBoard, W&B or MLflow.

A row of numbers goes to each tracker. metrics.jsonl (`local.py`) is the complete record; `base.py`
puts the trackers that may be slow behind a thread, so that none stops or slows training. Open
`base.py` first.
"""

"""Metric trackers: metrics.jsonl always, and TensorBoard, W&B or MLflow.

Every tracker gets each row of numbers. metrics.jsonl (`local.py`) is the complete record. `base.py`
runs trackers that may be slow in a thread, so that none stops or slows training. Open `base.py`
first.
"""

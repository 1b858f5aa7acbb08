"""Where curves go: metrics.jsonl always, and TensorBoard, W&B or MLflow.

`base.py` is the seam and the rule that a tracker never stops training; `background.py` keeps
those that may be slow behind a thread. Open `base.py` first.
"""

"""Hugging Face models: built empty or whole, and filled with weights piece by piece.

`build.py` makes a model from weights, a config or a shipped shape. `fill.py` reads weights into a
model that is sharded over ranks, and `pieces.py` finds the weights in its files. `attention.py`,
`adapter.py` and `recompute.py` change how a model computes. `untrained.py` finds tokens that an
adapter cannot teach. Open `build.py` first.
"""

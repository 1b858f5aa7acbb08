"""Hugging Face models: built empty or whole, and filled with weights piece by piece.

`build.py` makes a model from weights, a config or a shipped shape; `fill.py` brings weights into
one that is cut over ranks, by the `pieces.py` of its files; `attention.py`, `adapter.py` and
`recompute.py` change how it computes. `untrained.py` finds what an adapter cannot teach. Open
`build.py` first.
"""

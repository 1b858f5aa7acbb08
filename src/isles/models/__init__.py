"""Hugging Face models: built empty or whole, and filled with weights piece by piece.

`build.py` makes a model from weights, a config or a shipped shape; `fill.py` brings weights into
one that is cut over ranks; `attention.py` and `adapter.py` change what it computes. Open
`build.py` first.
"""

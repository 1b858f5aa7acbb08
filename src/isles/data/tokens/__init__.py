"""Tokens on disk: `encode.py` turns rows into tokens, `store.py` writes and opens folders of them,
and `prepare.py` makes one wherever it is needed. Open `prepare.py` first."""

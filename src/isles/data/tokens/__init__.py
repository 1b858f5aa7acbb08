"""Tokens on disk: `encode.py` turns rows into tokens, `store.py` writes and opens folders of them,
and `prepare.py` makes a folder on each node that needs it. Open `prepare.py` first."""

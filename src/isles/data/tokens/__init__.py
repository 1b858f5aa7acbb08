"""Tokens on disk: `encode.py` turns rows into tokens, `writer.py` writes them, `store.py` opens a
folder of them, and `prepare.py` makes one wherever it is needed. Open `prepare.py` first."""

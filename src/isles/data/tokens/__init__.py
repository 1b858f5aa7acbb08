"""Tokens on disk: prepared once, into folders that are whole or absent; `prepare.py` first."""

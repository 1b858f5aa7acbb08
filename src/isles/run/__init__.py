"""The run directory: what the two wings leave for each other.

`paths.py` names every file, `records.py` reads and writes them whole or not at all, `begin.py`
makes a run or goes on with one, `find.py` looks runs up by name, `state.py` says how one stands,
`manifest.py` lists and verifies checkpoints, and `env.py` alone reads environment variables. Open
`paths.py` first.
"""

"""Before a start elsewhere.

`login.py` runs isles on a login node, or where a run is, and passes text on; `sync.py` copies files
to the hosts; `setup.py` makes their Python environments equal, by `install.py`, which runs there.
Open `login.py` first.
"""

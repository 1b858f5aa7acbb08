"""Preparation of other machines before a start.

`login.py` runs isles on a login node, or on the machine of a run, and passes on its output;
`sync.py` copies files to the hosts; `setup.py` makes their Python environments equal, with
`install.py`, which runs there. Open `login.py` first.
"""

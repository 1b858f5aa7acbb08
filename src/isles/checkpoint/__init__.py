"""Saving, verifying, loading, exporting.

`save.py` writes one folder beside its place, hashes it, reads it back and renames it, and decides
when, and which are kept; `load.py` takes the newest whole one, and brings it to nodes that have
disks of their own. `export.py` makes the folder that `from_pretrained` loads, with a model card
(`card.py`); `hub.py` uploads it. Open `save.py` first.
"""

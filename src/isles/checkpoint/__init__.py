"""Saving, verifying, loading, exporting.

`store.py` writes one folder beside, hashes it, reads it back and renames it; `manager.py` decides
when, and which are kept; `travel.py` brings together what nodes without a common disk have.
`export.py` makes the folder that `from_pretrained` loads. Open `store.py` first.
"""

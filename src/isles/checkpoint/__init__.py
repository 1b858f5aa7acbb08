"""Saving, verifying, loading, exporting.

`staging.py` copies a state into main memory. `save.py` writes it to a folder under a temporary
name, hashes it, reads it back and renames it. It also decides what to keep. `load.py` finds the
newest intact checkpoint and copies it to nodes with separate disks. `export.py` makes the folder
that `from_pretrained` loads, with a model card from `card.py`. `upload.py` uploads the folder. Open
`save.py` first.
"""

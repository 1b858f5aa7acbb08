"""Rows of sources: `find.py` finds what one names, `read.py` reads files in chunks, and `parse.py`
makes documents of rows by their type. `rows.py` has what they hand on. Open `find.py` first."""

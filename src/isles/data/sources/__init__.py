"""Rows of sources: `find.py` finds what one names, `read.py` and `hub.py` read it in chunks, and
`parse.py` checks what the columns hold. `rows.py` has what they hand on. Open `find.py` first."""

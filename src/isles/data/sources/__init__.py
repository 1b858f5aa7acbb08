"""Rows of sources: `find.py` finds a source's files, `read.py` reads files in chunks, and
`parse.py` makes documents of rows by their type. `files.py` opens and unpacks files, `tables.py`
reads Parquet and Arrow. `rows.py` has the types that they share. Open `find.py` first."""

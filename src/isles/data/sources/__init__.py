"""Rows out of files, of the hub and of what is built in: `find.py` says what a source names."""

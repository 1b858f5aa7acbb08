"""The parts of the run file: frozen pydantic models, whose docstrings are docs/run-file.md.

A file has the sections of one subject; `run.py` puts them together. Open `run.py` first.
"""

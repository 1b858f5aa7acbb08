"""The parts of the run file: frozen pydantic models, whose docstrings are docs/run-file.md."""

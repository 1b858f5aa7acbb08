"""The run file: from its text to values that nothing changes any more.

`load.py` reads the file with its lines (`yaml.py`), applies overrides, has pydantic build the
frozen sections of `sections/`, and asks `rules/` what is wrong between them: every issue is
reported at once, in words of `explain.py`. `resolve.py` fills in what `auto` stands for and
writes resolved.yaml, which ranks read. `aliases/` knows the names that other tools use,
`interop/` the files of DeepSpeed and accelerate. Open `load.py` first, and `sections/run.py` for
the parts of a run file.
"""

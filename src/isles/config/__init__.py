"""The run file: from its text to frozen values.

`load.py` reads the file with its lines (`yaml.py`), applies overrides, lets pydantic build the
frozen sections of `sections/`, and checks the `rules/` between them. It reports all issues
together. `explain.py` turns pydantic's errors into issues, by the tree of keys (`keys.py`).
`issues.py` guesses the meaning of an unknown key. `resolve.py` derives values from the file and the
machine, and writes resolved.yaml for the ranks. `files.py` checks the files in a run file,
`clusters.py` splits it for several clusters, and `resume.py` compares it with the run file of an
older attempt. `aliases.yaml` has the names of other tools, `interop/` their files.

Open `load.py` first. To add a key, add a field with its text to a section in `sections/`. Forbidden
combinations with other keys are rules in the file of `rules/` of the same name. Its names in other
tools go into `aliases.yaml`.
"""

"""The run file: from its text to values that nothing changes any more.

`load.py` reads the file with its lines (`yaml.py`), applies overrides, has pydantic build the
frozen sections of `sections/`, and asks `rules/` what is wrong between them: every issue is
reported at once. `explain.py` turns pydantic's errors into issues, by the tree of keys (`keys.py`);
`issues.py` guesses what an unknown key was meant to be. `resolve.py` fills in what follows from
the file and the machine and writes resolved.yaml, which ranks read. `files.py` looks at the files
that a run file names, `clusters.py` takes it apart for several clusters, `resume.py` compares it
with that of an older start. `aliases.yaml` has the names that other tools use, `interop/` their
files.

Open `load.py` first. A new key is a field of its section in `sections/`, with its text below it;
what it may not be combined with is a rule in the file of `rules/` of the same name; what other
tools call it goes into `aliases.yaml`.
"""

"""`isles plan`: whether a run will fit, how fast it will be, and what to change first.

`verb.py` reads the run file and prints. `find.py` finds the machines (`machines.py`), `model.py`
the config.json. `step.py` says for one way to hold the model what each rank holds and how long a
step takes; it is asked by `ways.py` (the ladder of what makes it fit, other strategies) and by
`report.py`, which adds main memory, disk and what an earlier run showed (`measured.py`), for
`show.py` and for JSON. `roofline.py` has the times, `links.py` the bytes between clusters;
`apply.py` edits the run file. `simulate/` plays a run of clusters on a virtual clock. Nothing is
started, and nothing but a config.json is fetched. Open `step.py` first.
"""

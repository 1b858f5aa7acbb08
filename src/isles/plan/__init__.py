"""`isles plan`: whether a run fits, how fast it will be, and what to change first.

`verb.py` reads the run file and prints. `find.py` finds the machines (`machines.py`), and
`model.py` reads the config.json. `step.py` plans one way to hold the model: the memory of each
rank, and the time of a step. `ways.py` asks it for every memory-saving option and strategy, and
`report.py` adds main memory, disk and the figures of an earlier run (`measured.py`), for `show.py`
and for JSON. `isles.config.roofline` estimates times, `links.py` the bytes between clusters, and
`apply.py` edits the run file. `simulate/` simulates a run of several clusters on a virtual clock.
isles starts nothing here, and fetches only a config.json. Open `step.py` first.
"""

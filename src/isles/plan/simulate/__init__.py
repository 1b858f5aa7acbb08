"""A run of several clusters on a virtual clock: up to 10,000 clusters in seconds.

`verb.py` is what `isles plan --simulate` does: `fleet.py` reads the fleet (or makes one of the run
file's clusters), `setting.py` the run file; `engine.py` plays them by discrete events: `member.py`
is a cluster, `line.py` a link that many share, `rounds.py` what the hub knows of outer steps.
`result.py` holds what was counted, `search.py` tries other settings,
`capacity.py` says what one hub carries. Open `engine.py` first.

The protocol is that of `isles.outer`, which belongs to the other wing: its formulas and constants
that are repeated here are compared with it in `tests/unit/test_simulate.py`.
"""

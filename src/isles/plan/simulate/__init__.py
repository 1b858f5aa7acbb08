"""Simulation of a run of several clusters on a virtual clock: up to 10,000 clusters in seconds.

`verb.py` is `isles plan --simulate`. `fleet.py` reads the fleet, or makes one from the clusters of
the run file, and `setting.py` reads the run file. `engine.py` simulates events: `member.py` is a
cluster, `line.py` a shared link, and `rounds.py` the hub's state of outer steps. `result.py`
has the figures. Open `engine.py` first.

The protocol is the protocol of `isles.outer`, which this package does not import. It repeats
formulas and constants, and `tests/unit/test_simulate.py` compares them.
"""

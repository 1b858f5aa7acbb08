"""`isles check`: what is wrong with the machines, before a run.

`verb.py` reads the run file and reaches the nodes: this machine, hosts over ssh, a login node, or
those of a job (`queue/job.py`, and `step.py` on them). `node.py` runs on each of them, and has the
checks of `checks/` measure there and yield findings. `conduct.py` is the course of it: what is
asked when, and what is compared between nodes. `report.py` prints the findings. Open `conduct.py`
first.
"""

"""`isles check`: findings on the machines, before a run.

`verb.py` reads the run file, and connects to the nodes: this machine, hosts over ssh, a login node,
or the nodes of a job (`job.py`). Its `check_hosts` checks them. `node.py` runs on each node, and
the checks of `checks/` measure there and yield findings. `step.py` does the same in a job, and
`scheduler.py` queries Slurm and PBS. `plan.py` has the queries of each host, and `finding.py` the
report. Open `verb.py` first.
"""

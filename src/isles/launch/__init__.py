"""Start of a run: on this machine, over ssh, through a scheduler, on several clusters.

`start.py` chooses by the run file's launcher: `local.py`, `ssh/`, `queue/` (Slurm and PBS),
`kubernetes/`, `ray/`, `skypilot/` or `manual.py`. `base.py` has the options that every launcher
takes, and the started run that it returns. `remote/` prepares login nodes and other machines before
a start (copying, installing). For several clusters, `multi_cluster.py` assigns GPUs to each,
`hub.py` starts the hub that averages their weights, and `join.py` makes the run file of a cluster
that joins from another site. `render.py` writes files that run without isles. `answers.py` checks
answers of other programs and machines. Open `start.py` first.
"""

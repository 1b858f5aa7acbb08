"""Starting a run: on this machine, over ssh, through a scheduler, on several clusters.

`start.py` chooses by the run file's launcher: `local.py`, `ssh/`, `queue/` (Slurm and PBS) or
`manual.py`; what each is given and gives back is in `base.py`. `remote/` is what happens on login
nodes and other machines before a start (copying, installing). Of several clusters,
`multi_cluster.py` gives each its GPUs, `hub.py` starts the hub through which they average, and
`join.py` makes the run file of a cluster that joins from elsewhere. `render.py` writes files that
run without isles. `answers.py` checks answers of other programs and machines. Open `start.py`
first.
"""

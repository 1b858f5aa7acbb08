"""Starting a run: on this machine, over ssh, through a scheduler, on several clusters.

`start.py` chooses by the run file's launcher: `local.py`, `ssh/`, `slurm/`, `pbs/` or
`manual.py`; what each is given and gives back is in `base.py`. `queue/` has what Slurm and PBS
share, `remote/` what happens on login nodes and other machines before a start (copying,
installing), `node/` what answers there, `render/` the files that run without isles. Open
`start.py` first.
"""

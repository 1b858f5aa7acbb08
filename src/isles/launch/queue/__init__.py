"""The launchers slurm and pbs.

`submit.py` starts a run: it makes the run directory, has `script.py` write the job script, and
submits it. `job.py` has the base classes for schedulers and for the nodes of a job, and the job of
a run; `slurm.py` and `pbs.py` derive from them. The meanings of schedulers' messages are data, in
`reasons.yaml`. `status.py` queries the state of jobs. Open `submit.py` first.
"""

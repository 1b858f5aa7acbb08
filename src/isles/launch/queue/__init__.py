"""The launchers slurm and pbs.

`submit.py` starts a run: it makes the run directory, has `script.py` write the job script, and
submits it. `job.py` has the base classes of a scheduler and of the nodes of a job, and the job of a
run; `slurm.py` and `pbs.py` derive from them. What a scheduler's words mean is data, in
`reasons.yaml`. `status.py` asks how jobs stand. Open `submit.py` first.
"""

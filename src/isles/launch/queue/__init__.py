"""The launchers slurm and pbs.

`submit.py` starts a run: it makes the run directory, has `script.py` write the job script, and
submits it. `job.py` has the base classes of a scheduler's commands, of the job of a run, and of the
nodes of a job; `slurm.py` and `pbs.py` derive from them, `reasons.py` puts their words into
sentences. `status.py` asks how jobs stand. Open `submit.py` first.
"""

"""`isles check`: findings on the machines, before a run.

`verb.py` reads the run file, reaches the nodes (this machine, hosts over ssh, a login node, those
of a job by `job.py`) and has the course of a check over them, `check_hosts`. `node.py` runs on each
node, where the checks of `checks/` measure and yield findings; `step.py` does so in a job;
`scheduler.py` asks Slurm and PBS. `plan.py` says what is asked of which host; `finding.py` has the
findings and prints them. Open `verb.py` first.
"""

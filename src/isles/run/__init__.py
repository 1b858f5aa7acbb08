"""The run directory: files that the control side and the ranks write for each other.

`paths.py` names every file, and `records.py` reads and writes them atomically. `choose.py` chooses
the run directory of a start, and `begin.py` makes or resumes it under the claim of `claim.py`.
`find.py` finds runs by name, and `state.py` checks whether a run is active. `outcome.py` and
`restarts.py` record how an attempt ended and where it resumed. `checkpoints.py` lists and verifies
checkpoints, `live.py` passes samples and stacks to viewers, `limits.py` and `cards.py` read the
machine and its GPUs, and only `env.py` reads environment variables. Open `paths.py` first.
"""

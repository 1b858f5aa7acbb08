"""The run directory: what the two wings leave for each other.

`paths.py` names every file, `records.py` reads and writes them atomically, `choose.py`
chooses the run directory of a start, `begin.py` makes or resumes it under the claim of `claim.py`,
`find.py` looks runs up by name, `state.py` finds out whether one runs,
`outcome.py` and `restarts.py` record how an attempt ended and where it went on, `checkpoints.py`
lists and verifies checkpoints, `live.py` is for whoever watches, and `env.py` alone reads
environment variables. Open `paths.py` first.
"""

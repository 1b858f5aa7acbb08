"""The launcher kubernetes: pods of a Job, a JobSet or a TrainJob, each of which runs an agent.

`start.py` makes the objects with the user's kubectl (`kubectl.py`) from what `manifest.py` writes,
and waits until the run has begun. `pod.py` is the first process of each pod: that of index 0 makes
the run directory on the claim and starts the coordinator, as a job of a queue does; the others
reach it by its name. `reach.py` runs a command in a pod, as ssh would on a host: by it all other
verbs find the run. Open `start.py` first.
"""

"""The launcher kubernetes: pods of a Job, a JobSet or a TrainJob, with an agent in each pod.

`start.py` creates the objects of `manifest.py` with the user's kubectl (`kubectl.py`), and waits
until the run has started. `pod.py` is the first process of each pod. The pod of index 0 makes the
run directory on the claim and starts the coordinator, like a job of a queue; the other pods connect
to it by its name. `reach.py` runs a command in a pod, as ssh would on a host: all other isles
commands find the run through it. Open `start.py` first.
"""

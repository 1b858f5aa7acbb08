"""The launcher skypilot: SkyPilot finds and starts the nodes, by the user's own command sky.

`start.py` starts a run: it has `task.py` write the task file, submits it by sky, and reads the log
of its job until `head.py`, which that task runs on the first node, says which run it has begun.
From then on the run is one on another machine, which ssh reaches by the name of SkyPilot's cluster.
Open `start.py` first.
"""

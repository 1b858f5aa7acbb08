"""The launcher skypilot: SkyPilot finds and starts the nodes, with the user's own command sky.

`start.py` starts a run: `task.py` writes the task file, sky submits it, and `start.py` reads the
log of its job until `head.py`, which the task runs on the first node, announces its run. From then
on the run is a run on another machine, reached by ssh under the name of SkyPilot's cluster. Open
`start.py` first.
"""

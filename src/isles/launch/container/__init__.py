"""Containers for the processes of a node: apptainer, podman, or pyxis of Slurm.

`python -m isles.agent` on a node enters the container of its run by itself, so that a launcher
starts the same command line with and without a container. Paths are the same inside and outside,
and lead to the same files. The processes, the network, the shared memory and the host's name are
those of the host, so the records of a run are valid on both sides.

`enter.py` finds the runtime of a node and makes its command line; open it first. `failure.py`
explains why a container could not be entered; `image.py` checks the content of an image before a
start.
"""

"""The container in which the processes of a node run: apptainer, podman, or pyxis of Slurm.

`python -m isles.agent` on a node enters the container of its run by itself, so that a launcher
starts the same command line with and without one. Inside and outside the same paths lead to the
same files, and the processes, the network, the shared memory and the host's name are those of the
host: what the records of a run say of a process is true on both sides.

`enter.py` finds the runtime of a node and makes its command line; open it first. `failure.py` says
why a container could not be entered; `image.py` asks an image what it has, before a start.
"""

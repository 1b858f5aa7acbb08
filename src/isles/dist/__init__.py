"""The ranks of one cluster: the process group, and small collectives on it.

`world.py` joins the group, gives each rank its place and device, and tells nodes apart; `mesh.py`
lays the grid that strategies cut along, `split.py` allocates the rows of a global batch, `batch.py`
is what a rank computes in one micro-batch. `files.py` finds out which nodes see the run directory
of rank 0, and brings files to those that do not. Open `world.py` first.
"""

"""The ranks of one cluster: the process group, and small collectives on it.

`world.py` joins the group and gives each rank its place and device, `nodes.py` tells nodes apart,
`mesh.py` lays the grid that strategies cut along, `split.py` deals the rows of a batch. `files.py`
finds out which nodes see the run directory of rank 0, and brings files to those that do not. Open
`world.py` first.
"""

"""The ranks of one cluster: the process group, and small collectives on it.

`world.py` joins the group, gives each rank its device, and finds out which ranks share a node.
`mesh.py` makes the grid along which strategies shard, `split.py` divides the rows of a global batch
among ranks, and `batch.py` has the inputs of one micro-batch. `files.py` finds out which nodes see
rank 0's run directory, and copies files to nodes that do not. Open `world.py` first.
"""

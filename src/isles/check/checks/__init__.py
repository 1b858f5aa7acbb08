"""The checks, by subject. A check is a generator. It takes the `NodePlan` of a node, measures on
the node, and yields findings. Checks that compare nodes (`try_…`, `…_findings`) run on the machine
that started the check, with the nodes' answers. Open `machine.py` first.
"""

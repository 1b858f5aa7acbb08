"""The checks, by subject. A check is a generator: it takes the `NodePlan` of the node on which it
measures, and yields findings there. What compares nodes (`try_…`, `…_findings`) runs where the
check began, on what the nodes have answered. Open `machine.py` first.
"""

"""The checks, by subject. A check is a generator: it takes the `NodePlan` of the node on which it
measures, and yields findings there. What compares nodes takes what they have said, or asks for it
(`try_…`), where the check began. Open `machine.py` first.
"""

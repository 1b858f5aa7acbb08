"""What the ranks of a cluster do between two outer steps, and in one: `loop.py` first."""

"""Numbers about the world, which no run changes: units, GPUs, FLOP counts, shapes of models.

`gpus.py` is the table of cards, `flops.py` and `memory.py` count what training takes, `units.py`
reads and writes quantities. Nothing here imports another room. Open `memory.py` first.
"""

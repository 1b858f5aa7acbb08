"""Numbers about the world, which no run changes: units, GPUs, FLOP counts, shapes of models.

`gpus.py` is the table of cards, `models.py` has shapes of models and which kinds can be cut how,
`cost.py` counts the FLOPs of training and `memory/` its bytes, `units.py` reads and writes
quantities, and `troubleshooting.py` has the paragraphs that `isles explain` prints. Nothing here
imports another room. Open `memory/step.py` first.
"""

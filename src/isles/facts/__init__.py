"""Facts that no run changes: units, GPUs, FLOP counts, shapes of models.

`gpus.py` is the table of GPUs, and `models.py` has shapes of models and their supported
parallelism. `cost.py` counts the FLOPs of training, and `memory/` its bytes. `units.py` parses and
formats quantities, and `troubleshooting.py` has the paragraphs of `isles explain`. This package
imports no other package of isles. Open `memory/step.py` first.
"""

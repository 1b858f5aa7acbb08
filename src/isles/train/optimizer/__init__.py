"""Optimizers: torch's AdamW and SGD, Muon, and AdamW for small memories.

`make.py` makes them from the run file: open it first. `sgd.py`, `muon.py` and `low_memory.py` have
the optimizers that torch lacks, and `shards.py` their common parts.

The stepper gives every optimizer `found_inf`, as torch's loss scaler does: a tensor on the device
of the weights. If it is 1.0, `step` changes nothing. No optimizer waits for the device to read it.
"""

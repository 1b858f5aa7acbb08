"""Parallelism of a cluster: the model is whole on each rank, or sharded over the ranks.

`base.py` has the class `Engine` that the loop uses. `ddp.py`, `fsdp.py`, `pipeline/` and
`deepspeed/` are its subclasses, and `stepper.py` has the optimizer step of the engines on plain
PyTorch. `tensor_parallel.py` shards the blocks and `sequence.py` the sequences. `objective.py`
defines the loss, and `head.py` computes it without holding all logits. Open `base.py` first, then
`ddp.py`.
"""

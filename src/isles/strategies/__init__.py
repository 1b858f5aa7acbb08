"""How a cluster holds the model: whole on each rank, or cut over them.

`base.py` has the class `Engine` that the loop works with; `ddp.py`, `fsdp.py`, `pipeline/` and
`deepspeed/` are its subclasses, and `stepper.py` has the optimizer step of those on plain PyTorch.
`tensor_parallel.py` cuts the blocks and `sequence.py` the sequences; `objective.py` is what is
minimised, and `head.py` computes it without holding all logits. Open `base.py` first, then
`ddp.py`.
"""

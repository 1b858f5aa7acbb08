"""How a cluster holds the model: whole on each rank, or cut over them.

`base.py` is the seam (`Engine`) that the loop works with; `ddp.py`, `fsdp.py`, `pipeline/` and
`deepspeed/` are behind it, and `stepper.py` has the optimizer step that those on plain PyTorch
share. `tensor_parallel.py` and `sequence.py` cut the blocks and the sequences, `head.py` computes
the loss without all logits. Open `base.py` first, then `ddp.py`.
"""

"""The memory of a training step, counted beforehand: no torch, no weights, no GPU.

`architecture.py` says how a config.json becomes blocks; `forward.py` walks them on paper and notes
what PyTorch keeps for the backward pass; `setting.py` has what a step depends on beside the model,
and `step.py` puts weights, gradients, optimizer state and activations together, moment by moment.
Open `step.py` first. What a run file and a strategy mean for them is said in `config/memory.py`.
"""

"""Memory of a training step, counted in advance without torch, weights or a GPU.

`architecture.py` turns a config.json into blocks. `forward.py` simulates their forward pass, and
counts the tensors that PyTorch keeps for the backward pass. `setting.py` has the settings of a
step, and `step.py` adds up weights, gradients, optimizer state and activations, phase by phase.
Open `step.py` first. `config/memory.py` translates a run file and a strategy.
"""

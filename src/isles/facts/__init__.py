"""Numbers about the world: units, GPUs, FLOP counts, shapes of models."""

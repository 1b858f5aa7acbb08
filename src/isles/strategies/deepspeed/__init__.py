"""DeepSpeed ZeRO: the engine, and conversion of its state for checkpoints."""

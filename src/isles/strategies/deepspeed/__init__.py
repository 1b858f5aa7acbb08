"""DeepSpeed ZeRO: the engine, and its state in and out of checkpoints."""

"""DeepSpeed ZeRO: the engine, how it is set up, and its state in and out of checkpoints."""

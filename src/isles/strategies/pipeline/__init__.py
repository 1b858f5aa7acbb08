"""Pipeline parallel: the engine, and its stages with the micro-batches that go through."""

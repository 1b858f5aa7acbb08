"""Pipeline parallel: the engine, its stages, and the schedule of micro-batches."""

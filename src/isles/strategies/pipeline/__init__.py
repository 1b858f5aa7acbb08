"""Pipeline parallel: the engine, its schedule, and how blocks are split over stages."""

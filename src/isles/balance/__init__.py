"""Unequal GPUs, equal time: measuring the ranks and dealing the rows."""

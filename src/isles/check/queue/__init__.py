"""Checks through a scheduler: what it says of its nodes, and a job that measures on them."""

"""Ranks that take no step: noticed by `watchdog.py`, named by what their stacks say."""

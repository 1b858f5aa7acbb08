"""The deadline of whatever a test waits for."""

DEADLINE_S = 600.0
"""Of a machine whose cores others keep busy: who reaches it has met a fault. A time that is
promised to people is no deadline: its test passes a clock in."""

"""Reading what a run leaves behind."""

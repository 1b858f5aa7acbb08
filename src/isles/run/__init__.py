"""The run directory: where the two wings meet."""

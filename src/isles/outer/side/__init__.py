"""The process beside rank 0 that speaks to the other clusters."""

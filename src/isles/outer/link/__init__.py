"""Between rank 0 and the process beside it that speaks to the other clusters."""

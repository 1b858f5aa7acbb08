"""Slurm: the batch script, submitting it, what squeue and sacct say, and why a job waits."""

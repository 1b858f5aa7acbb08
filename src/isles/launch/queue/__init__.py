"""What Slurm and PBS share: a job and how it stands, asking a scheduler, submitting."""

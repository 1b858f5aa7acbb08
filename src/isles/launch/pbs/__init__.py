"""PBS, OpenPBS and Torque: the script, submitting it, what qstat says, and why a job waits."""

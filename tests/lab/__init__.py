"""Test clusters on one machine: hosts as network namespaces with a real sshd, and a real Slurm."""

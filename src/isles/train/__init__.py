"""Every rank's program."""

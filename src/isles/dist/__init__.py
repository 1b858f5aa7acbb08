"""Ranks of one cluster: the process group and small collectives."""

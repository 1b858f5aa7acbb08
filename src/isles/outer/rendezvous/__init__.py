"""The meeting point of clusters: members, samples, turns, averages; it knows bytes, not models."""

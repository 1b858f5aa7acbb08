"""`isles render`: files that run without isles."""

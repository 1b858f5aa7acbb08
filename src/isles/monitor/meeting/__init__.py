"""`isles rendezvous`: where clusters of several places meet, as a run of its own."""

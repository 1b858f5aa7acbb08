"""Engine hivemind: clusters find one another by its DHT; any of them may die."""

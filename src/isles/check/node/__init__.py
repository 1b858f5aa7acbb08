"""What a node measures while it is checked; `operations.py` answers the starter's requests."""

"""What must hold between sections: generators of issues, all asked by `all.py`."""

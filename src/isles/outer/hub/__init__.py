"""The server through which clusters average; `core.py` decides, `server.py` listens."""

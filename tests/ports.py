"""A port for a server that a test starts later."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the kernel gives to whoever asks for any: a port of that kind may be given to
# another process between the moment it was found free and the moment it is used.
_FIRST, _NUM = 20_000, 12_000
_next = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """A port of the loopback on which nobody listens, and which no other test is given."""
    while True:
        port = _FIRST + next(_next) % _NUM
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

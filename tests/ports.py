"""Ports: one for a server that a test starts later, and one on which something else listens."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.deadline import DEADLINE_S

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


@contextmanager
def listening(talk: Callable[[socket.socket], object]) -> Iterator[int]:
    """The port of a stranger, who does this with whoever comes, and hangs up at the end."""
    held: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                held.append(server.accept()[0])
                talk(held[-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE_S)
            for connection in held:
                connection.close()

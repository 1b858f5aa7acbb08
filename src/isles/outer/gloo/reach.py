"""Whether the members of an epoch reach one another: each calls each, before gloo waits for it.

gloo itself only says after a minute that something has timed out, not between whom.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import psutil
from torch._C._distributed_c10d import Store

from isles.errors import CommunicationError

_TOKEN_BYTES = 16


class UnreachableError(CommunicationError):
    """Clusters do not reach one another; all members of the epoch raise the same.

    Args:
        pairs: ranks, of which the first does not reach the second.
        what, where, fix: for people.
    """

    def __init__(
        self, pairs: Sequence[tuple[int, int]], what: str, *, where: str, fix: str
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.pairs = list(pairs)


def address_of(place: str) -> str:
    """The address by which others are to reach this host.

    Args:
        place: a network interface, an address, or empty: what the host's name resolves to.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        for found in psutil.net_if_addrs().get(place, ()):
            if found.family == family:
                return str(found.address)
    return place or socket.gethostbyname(socket.gethostname())


def call_each_other(
    store: Store, rank: int, names: Sequence[str], place: str, timeout_s: float
) -> None:
    """Make sure that each member reaches each other one. All members of the epoch must call this.

    A member answers with a word that it has told the others through the rendezvous, so that a
    unknown connection who has the same private address elsewhere is not taken for it.

    Args:
        store: of the epoch.
        rank: of this cluster.
        names: of the clusters, by rank.
        place: see `address_of`.
        timeout_s: for a call.

    Raises:
        UnreachableError: some do not; the same on all members.
    """
    others = [other for other in range(len(names)) if other != rank]
    token = secrets.token_hex(_TOKEN_BYTES)
    with _answering(place, names[rank], token.encode()) as (host, port):
        store.set(f"call/{rank}", json.dumps([host, port, token]))

        def call(other: int) -> str:
            host, port, word = json.loads(store.get(f"call/{other}"))
            return _call(host, port, word.encode(), timeout_s)

        with ThreadPoolExecutor(len(others)) as pool:
            faults = dict(zip(others, pool.map(call, others), strict=True))
        store.set(f"reach/{rank}", json.dumps({r: why for r, why in faults.items() if why}))
        found = {
            (one, int(other)): str(why)
            for one in range(len(names))
            for other, why in json.loads(store.get(f"reach/{one}")).items()
        }
    if found:
        words = [f"{names[a]} does not reach {names[b]} at {why}" for (a, b), why in found.items()]
        raise UnreachableError(
            list(found),
            "; ".join(words),
            where=f"cluster {names[rank]}",
            fix="open all TCP ports between them, or use `engine: hub`",
        )


@contextmanager
def _answering(place: str, name: str, token: bytes) -> Iterator[tuple[str, int]]:
    """Say the word to whoever calls at this address and port."""
    with closing(_listen(place, name)) as server:
        threading.Thread(target=_answer, args=(server, token), daemon=True).start()
        try:
            yield server.getsockname()[:2]
        finally:
            # `close` alone would not wake the thread that accepts.
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)


def _listen(place: str, name: str) -> socket.socket:
    """Open a port where the others shall reach this cluster."""
    try:
        here = address_of(place)
        family = socket.AF_INET6 if ":" in here else socket.AF_INET
        return socket.create_server((here, 0), family=family, backlog=128)
    except OSError as error:
        raise CommunicationError(
            f"outer.interface {place} is no network interface of {name}'s host: {error}; it has "
            f"{', '.join(psutil.net_if_addrs())}",
            where=f"cluster {name}",
            fix="name one of these, or leave outer.interface out",
        ) from error


def _answer(server: socket.socket, token: bytes) -> None:
    """Say the word to whoever calls, until nobody listens any more."""
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            with closing(connection), suppress(OSError):
                connection.settimeout(1.0)
                connection.sendall(token)


def _call(host: str, port: int, token: bytes, timeout_s: float) -> str:
    """Call a member; empty, or where it is and why it is not reached."""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            said = connection.recv(len(token), socket.MSG_WAITALL)
    except OSError as error:
        why = f"nothing for {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        return f"{host} port {port}: {why}"
    return "" if said == token else f"{host} port {port}: another host answers there"

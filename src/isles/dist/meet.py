"""The stores at which ranks find one another: that of torchrun's agent, and that of ours."""

from __future__ import annotations

import signal
import socket
import threading
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from isles.errors import CommunicationError
from isles.run.process import die_with_agent

_LOOK_S = 0.05


def agent_store(address: tuple[str, int], rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store of torchrun's agent, under a prefix that only the ranks of this start know.

    torch takes its own count of restarts as the prefix, and that differs between nodes: an agent
    that follows another one into a restart does not count it. The ranks would then read addresses
    of ranks that are dead. All ranks must call this.

    Args:
        address: where the store listens.
        rank, world_size: this rank's place.
        timeout: longest wait for the others.

    Raises:
        CommunicationError: a rank did not come in time.
    """
    store = TCPStore(*address, is_master=False, timeout=timeout)
    if rank:
        name = uuid.uuid4().hex
        store.set(f"isles/hello/{rank}", name)
        token = store.get(f"isles/answer/{name}").decode()
        store.set(f"isles/heard/{token}/{rank}", "1")
    else:
        token = uuid.uuid4().hex
        _answer_all(store, token, set(range(1, world_size)), timeout)
    return PrefixStore(f"isles/{token}", store)


def _answer_all(store: Store, token: str, missing: set[int], timeout: timedelta) -> None:
    """Answer each rank that says hello, until every one has heard it.

    A hello may be left over from a rank that is dead: it is answered and never heard.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    answered: set[str] = set()
    while missing:
        for rank in sorted(missing):
            if store.check([f"isles/heard/{token}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"isles/hello/{rank}"]):
                name = store.get(f"isles/hello/{rank}").decode()
                if name not in answered:
                    answered.add(name)
                    store.set(f"isles/answer/{name}", token)
        if time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise CommunicationError(
                f"these ranks did not come within {timeout.total_seconds():.0f} s: {names}",
                where="rank 0",
                fix="look at what torchrun printed on their hosts",
                id="start.timeout",
            )
        time.sleep(_LOOK_S)


def serve_store(listener: socket.socket) -> None:
    """Answer as the store at which the ranks of all nodes meet, to the end of the agent.

    Args:
        listener: already bound: torch would listen on every interface.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ranks that save still need it
    die_with_agent()
    address, port = listener.getsockname()[:2]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    threading.Event().wait()
    del store

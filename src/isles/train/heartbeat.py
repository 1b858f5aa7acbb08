"""Heartbeats of the ranks, beside their work, over the store through which they have met.

A thread with a connection of its own sends and reads them: it works while the main thread waits
inside torch, and it needs no shared disk.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from isles.dist.world import World
from isles.run.env import RankEnv

HEARTBEAT_S = 1.0
"""How often a rank sends one."""

_CONNECT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The newest heartbeat of a rank: what it holds, and when it was read, by the local clock."""

    view: dict[str, Any]
    at: float


class Heartbeats:
    """Sends this rank's heartbeats, and reads those of the others while `is_reading`.

    Args:
        address: host and port of the store.
        token: prefix of the keys, known to the ranks of this start only.
        rank, world_size: this rank's place.
        store_rank: the rank whose process serves the store; None: another process does.
        server: the store itself, on the rank that serves it.
        now: monotonic clock, seconds.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        *,
        rank: int,
        world_size: int,
        store_rank: int | None,
        server: Store | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self.address = address
        self.store_rank = store_rank
        self.view: dict[str, Any] = {}
        """What the heartbeats of this rank hold; replaced as a whole."""
        self.is_reading = False
        self.last_seen: dict[int, LastSeen] = {}
        self.asked = ""
        """The newest question to all ranks."""
        self.posted: dict[int, str] = {}
        """The newest answer of each rank; only while `is_reading`."""
        self.answered_at = now()
        """When the store has last answered."""
        self._token = token
        self._rank = rank
        self._world_size = world_size
        self._server = server
        self._number = 0
        self._lock = threading.Lock()
        self._outgoing: dict[str, str] = {}
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def ask(self, question: str) -> None:
        """Ask every rank, this one too; they find it in `asked`."""
        self._send("ask", question)

    def post(self, answer: str) -> None:
        """Show an answer to every rank, in place of the one before."""
        self._send(f"post-{self._rank}", answer)

    def close(self) -> None:
        """Send no more."""
        self._is_over.set()

    def _send(self, name: str, text: str) -> None:
        with self._lock:
            self._outgoing[name] = text

    def _run(self) -> None:
        store: Store | None = None
        while not self._is_over.wait(HEARTBEAT_S):
            try:
                if store is None:
                    client = TCPStore(*self.address, is_master=False, timeout=_CONNECT)
                    store = PrefixStore(f"watch-{self._token}", client)
                self._exchange(store)
            except Exception:  # gone, or cut off: seen by `answered_at`, and tried again
                store = None

    def _exchange(self, store: Store) -> None:
        self._number += 1
        store.set(f"heartbeat-{self._rank}", json.dumps([self._number, self.view]))
        with self._lock:
            outgoing = dict(self._outgoing)
        for name, text in outgoing.items():
            store.set(name, text)
            with self._lock:  # only now: what a lost connection has not delivered is sent again
                if self._outgoing.get(name) == text:
                    del self._outgoing[name]
        if store.check(["ask"]):
            self.asked = store.get("ask").decode()
        for rank in range(self._world_size) if self.is_reading else ():
            if not store.check([f"heartbeat-{rank}"]):
                continue
            number, view = json.loads(store.get(f"heartbeat-{rank}"))
            before = self.last_seen.get(rank)
            if before is None or before.view["number"] != number:
                self.last_seen[rank] = LastSeen({**view, "number": number}, self._now())
            if store.check([f"post-{rank}"]):
                self.posted[rank] = store.get(f"post-{rank}").decode()
        self.answered_at = self._now()


def start_heartbeats(world: World, env: RankEnv, now: Callable[[], float]) -> Heartbeats:
    """Begin to send heartbeats, timed by a monotonic clock. All ranks must call this."""
    own: Store = _get_default_store()
    while isinstance(own, PrefixStore):
        own = own.underlying_store
    address: tuple[str, int] | None = None
    server: Store | None = None
    if isinstance(own, TCPStore):
        address = own.host, own.port
    elif world.is_main:  # the ranks of one machine have met in a file
        server, address = serve_on_loopback()
    # Ranks of several hosts may know the store of all by several addresses.
    shared = world.broadcast((uuid.uuid4().hex, address if server is not None else None))
    token, loopback = shared
    address = loopback or address
    assert address is not None, "either all ranks have met at a server, or none"
    # Else the store belongs to the coordinator or to torchrun's agent.
    is_ours = env.store_address is None and env.agent_store is None
    return Heartbeats(
        (str(address[0]), int(address[1])),
        token,
        rank=world.rank,
        world_size=world.world_size,
        store_rank=0 if is_ours else None,
        server=server,
        now=now,
    )


def serve_on_loopback() -> tuple[Store, tuple[str, int]]:
    """A store for the ranks of this machine, which no other machine can reach, and its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    server = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_CONNECT,
        master_listen_fd=listener.detach(),
    )
    return server, ("127.0.0.1", port)

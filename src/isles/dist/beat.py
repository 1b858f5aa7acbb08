"""Signs of life that the ranks give one another beside their work, over the store they met at.

Everything here runs in a thread of its own with a connection of its own: it works while a rank's
main thread waits inside of torch, and it needs no common disk.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from isles.dist.world import World
from isles.run.env import RankEnv

BEAT_S = 1.0
"""How often a rank gives a sign of life."""

_CONNECT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Heard:
    """What was last heard of a rank.

    Args:
        view: what it said of itself.
        at: when that was new, by the clock of the `Beats`.
    """

    view: dict[str, Any]
    at: float


class Beats:
    """This rank's signs of life, and what it hears of the others.

    Args:
        address: host and port of the store.
        token: that only the ranks of this start know.
        rank, world_size: this rank's place.
        keeper: the rank whose process keeps the store; None: somebody else does.
        server: the store itself, on the rank that keeps it.
        now: seconds that only ever grow.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        *,
        rank: int,
        world_size: int,
        keeper: int | None,
        server: Store | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self.address = address
        self.keeper = keeper
        self.view: dict[str, Any] = {}
        """What this rank says of itself; replaced as a whole."""
        self.listening = False
        """Whether the others are listened to; while all is well nobody does."""
        self.heard: dict[int, Heard] = {}
        self.asked = ""
        """What somebody has last asked all ranks for."""
        self.posted: dict[int, str] = {}
        """What each rank has last posted; only while the others are listened to."""
        self.talked_at = now()
        """When the store has last answered."""
        self._token = token
        self._rank = rank
        self._world_size = world_size
        self._server = server
        self._number = 0
        self._lock = threading.Lock()
        self._outgoing: dict[str, str] = {}
        self._is_over = threading.Event()
        threading.Thread(target=self._talk, name="beat", daemon=True).start()

    def ask(self, what: str) -> None:
        """Ask every rank, this one too, for something; they see it as `asked`."""
        self._send("ask", what)

    def post(self, text: str) -> None:
        """Leave something where every rank can see it, in place of what was there."""
        self._send(f"post-{self._rank}", text)

    def close(self) -> None:
        """No more signs of life."""
        self._is_over.set()

    def _send(self, name: str, text: str) -> None:
        with self._lock:
            self._outgoing[name] = text

    def _talk(self) -> None:
        store: Store | None = None
        while not self._is_over.wait(BEAT_S):
            try:
                if store is None:
                    client = TCPStore(*self.address, is_master=False, timeout=_CONNECT)
                    store = PrefixStore(f"watch-{self._token}", client)
                self._round(store)
            except Exception:  # gone, or cut off: seen by `talked_at`, and tried again
                store = None

    def _round(self, store: Store) -> None:
        self._number += 1
        store.set(f"beat-{self._rank}", json.dumps([self._number, self.view]))
        with self._lock:
            outgoing = dict(self._outgoing)
        for name, text in outgoing.items():
            store.set(name, text)
            with self._lock:  # only now: a store that is cut off hears of it later
                if self._outgoing.get(name) == text:
                    del self._outgoing[name]
        if store.check(["ask"]):
            self.asked = store.get("ask").decode()
        if self.listening:
            self._listen(store)
        self.talked_at = self._now()

    def _listen(self, store: Store) -> None:
        for rank in range(self._world_size):
            key = f"beat-{rank}"
            if not store.check([key]):
                continue
            number, view = json.loads(store.get(key))
            before = self.heard.get(rank)
            if before is None or before.view["number"] != number:
                self.heard[rank] = Heard({**view, "number": number}, self._now())
            if store.check([f"post-{rank}"]):
                self.posted[rank] = store.get(f"post-{rank}").decode()


def open_beats(world: World, env: RankEnv, now: Callable[[], float]) -> Beats:
    """Begin to give signs of life, by a clock that only ever grows. All ranks must call this."""
    own = _tcp_store(_get_default_store())
    server: Store | None = None
    offer: Mapping[str, Any] | None = None
    if world.is_main:
        address: tuple[str, int] | None = None
        if own is None:  # the ranks of one machine, which have met in a file
            server, address = _serve()
        offer = {"token": uuid.uuid4().hex, "address": address}
    told = world.broadcast(offer)
    address = told["address"]
    if address is None:
        assert own is not None, "either all ranks have met at a server, or none"
        address = own.host, own.port
    # Else the store belongs to the coordinator or to torchrun's agent.
    is_ours = env.meeting is None and env.agent_store is None
    return Beats(
        (str(address[0]), int(address[1])),
        str(told["token"]),
        rank=world.rank,
        world_size=world.world_size,
        keeper=0 if is_ours else None,
        server=server,
        now=now,
    )


def _tcp_store(store: Store) -> TCPStore | None:
    """The server that a store stands for; None where it is a file or this process alone."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _serve() -> tuple[Store, tuple[str, int]]:
    """A store for the ranks of this machine, which nobody else can reach."""
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

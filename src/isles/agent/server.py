"""Where the nodes of a run meet: the supervisor's door, and who has come through it."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from isles.errors import ExitCode
from isles.facts.text import printable
from isles.run.fleet import Fleet, FleetNode
from isles.run.pace import GONE_AFTER_S, HELLO_S, LOST_AFTER_S, SIGN_EVERY_S, Silence
from isles.run.process import ProcessId
from isles.run.wire import GREETING_BYTES, NotOurs, Wire
from isles.agent.connection_limit import ConnectionLimit

_ENOUGH = 12
"""So many digits of the digest are taken for the whole of it."""
_SHOWN = 8
"""So many of them are told to who has another."""

_LONGEST_WHY = 300
_PAUSE_S = 0.2


@dataclass(slots=True)
class NodeConnection:
    """One node that has come.

    Args:
        node: its number.
        token: a word that the agent has made up: another agent has another.
        process: the agent.
        silence: since it was last heard.
        report: what it said last about its ranks.
        wire: the connection; None while there is none.
        store: the port at which ranks can meet there; 0: none.
    """

    node: int
    token: str
    process: ProcessId
    silence: Silence
    wire: Wire | None
    store: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    skew_s: float = 0.0
    """How far its clock is behind the head's."""
    lost: str = ""
    """Why it is taken for lost; empty while it is there."""
    is_done: bool = False
    """Whether it has said goodbye."""
    sent: dict[str, Any] = field(default_factory=dict)
    sent_at: float = 0.0


class Refusal(Exception):
    """A newcomer that cannot be taken in, and why."""

    def __init__(
        self, what: str, fix: str, *, ends_run: bool = False, id: str = "start.refused"
    ) -> None:
        self.what = printable(what, keep="", longest=_LONGEST_WHY)
        super().__init__(self.what)
        self.fix = fix
        self.id = id
        self.ends_run = ends_run


@dataclass(frozen=True, slots=True)
class Identity:
    """What all nodes of a start must have in common.

    Args:
        run: the run's name.
        attempt: which start of it.
        digest: of resolved.yaml.
        versions: of isles and torch, on the head.
    """

    run: str
    attempt: int
    digest: str
    versions: dict[str, str]


class RendezvousServer:
    """Takes in the nodes of one start and hears their reports.

    Args:
        listener: a socket that listens.
        fleet: who is to come.
        identity: of this start.
        files: what a node that has nothing yet is given: its name and content.
        clock: seconds that only ever grow, for the coordinator as well.
    """

    def __init__(
        self,
        listener: socket.socket,
        fleet: Fleet,
        identity: Identity,
        files: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._listener = listener
        self._fleet = fleet
        self._identity = identity
        self._files = files
        self._lock = threading.Lock()
        self._peers: dict[int, NodeConnection] = {}
        self._dropped: set[str] = set()
        self.refused: Refusal | None = None
        """The last one."""
        self.fatal: Refusal | None = None
        """One of a node without which the run cannot begin."""
        self._unknown = ConnectionLimit(say)
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def peers(self) -> dict[int, NodeConnection]:
        """Who has come, by node; also those that are lost."""
        with self._lock:
            return dict(self._peers)

    def there(self) -> list[int]:
        """The nodes that are here now."""
        return sorted(node for node, peer in self.peers().items() if not peer.lost)

    def label(self, node: int) -> str:
        """A node as messages call it."""
        peer = self.peers().get(node)
        if self._fleet.launcher == "local" and peer is not None:
            return f"node {node} ({peer.process.host}, agent {peer.process.pid})"
        return self._node(node).label

    def look(self, now_s: float) -> None:
        """Take for lost whoever has been silent for too long."""
        for peer in self.peers().values():
            silent_s = peer.silence.look(now_s)
            if peer.lost or peer.is_done:
                continue
            if peer.wire is None and silent_s > GONE_AFTER_S:
                self.drop(peer, "its agent has ended without a word")
            elif silent_s > LOST_AFTER_S:
                self.drop(peer, f"it has not been heard of for {silent_s:.0f} s")

    def drop(self, peer: NodeConnection, why: str) -> None:
        """This node is lost; its agent is told so, should it still be there."""
        with self._lock:
            peer.lost = why
            self._dropped.add(peer.token)
        say(f"{self.label(peer.node)} is lost: {why}")
        self._part(peer, peer.wire)

    def order(self, node: int, order: dict[str, Any], now_s: float) -> None:
        """Tell a node what it is to do; said again every second, as a sign of life."""
        peer = self.peers().get(node)
        # Once: the thread that hears this node may take it away at any time.
        wire = peer.wire if peer is not None else None
        if peer is None or wire is None:
            return
        if order == peer.sent and now_s - peer.sent_at < SIGN_EVERY_S:
            return
        try:
            wire.send({"order": order})
        except OSError:
            self._part(peer, wire)
            return
        peer.sent, peer.sent_at = order, now_s

    def close(self) -> None:
        """Take in nobody more, and end all connections."""
        self._is_closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self.peers().values():
            self._part(peer, peer.wire)

    def _node(self, number: int) -> FleetNode:
        return self._fleet.nodes[number]

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:  # closed, or for a moment this process has too many open files
                self._is_closed.wait(_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        wire = Wire(connection)
        self._unknown.come(wire)
        try:
            first = wire.receive(HELLO_S, GREETING_BYTES) or {}
            self._unknown.greeted(wire)
            if "fetch" in first:
                self._check_digest(str(first["fetch"]))
                wire.send({"files": self._files()})
            elif "hello" in first:
                self._hear(self._take_in(first["hello"], wire), wire)
        except Refusal as refusal:
            self._unknown.tell(f"refused {address}: {refusal.what}")
            self.refused = refusal
            self.fatal = refusal if refusal.ends_run else self.fatal
            with suppress(OSError):
                where = f"{self._fleet.head.name} port {self._fleet.port}"
                told = {"what": refusal.what, "where": where, "fix": refusal.fix, "id": refusal.id}
                wire.send({"refused": {**told, "exit_code": int(ExitCode.PREFLIGHT)}})
        except OSError:
            pass  # it has gone, or knocks at every port
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            found = f"{type(error).__name__}: {error!r:.200}"
            self._unknown.tell(f"{address} has sent what no node sends: {found}")
        finally:
            self._unknown.greeted(wire)
            wire.close()

    def _hear(self, peer: NodeConnection, wire: Wire) -> None:
        try:
            while True:
                message = wire.receive(LOST_AFTER_S)
                if peer.wire is not wire:
                    return
                if message is None:
                    continue  # how long a silence may last, is for `look` to say
                peer.silence.heard()
                report = message.get("report", peer.report)
                if not isinstance(report, dict):
                    raise NotOurs("no report")
                peer.report = report
                peer.skew_s = time.time() - float(message.get("clock", time.time()))
                if message.get("bye"):
                    peer.is_done = True
                    return
        finally:
            self._part(peer, wire)

    def _part(self, peer: NodeConnection, wire: Wire | None) -> None:
        if wire is not None:
            wire.close()
        with self._lock:
            if peer.wire is wire and wire is not None:
                peer.wire = None
                # A process that has ended closes its connection: its silence begins here.
                peer.silence.heard()

    def _take_in(self, hello: dict[str, Any], wire: Wire) -> NodeConnection:
        self._check(hello)
        process = ProcessId.from_record(hello["process"])
        if process is None:
            raise NotOurs("no process")
        token, node = str(hello["token"]), int(hello["node"])
        with self._lock:
            if token in self._dropped:
                raise Refusal("this node was taken for lost", "it can join again as a new one")
            peer = self._peers.get(node)
            if peer is not None and peer.token != token and not peer.lost:
                if peer.wire is not None:
                    raise Refusal(
                        f"node {node} is there already: {peer.process.host}, process "
                        f"{peer.process.pid}",
                        "start each node once, each with its own number",
                    )
                peer.lost = "another agent has taken its place"
            if peer is None or peer.token != token:
                store = int(hello.get("store", 0))
                peer = NodeConnection(node, token, process, Silence(self.clock()), None, store)
                self._peers[node] = peer
            # Before anybody can send an order here: it is the first word that the agent expects.
            wire.send({"welcome": {"pid": os.getpid()}})
            old, peer.wire, peer.sent = peer.wire, wire, {}
            peer.silence.heard()
        if old is not None and old is not wire:
            old.close()
        return peer

    def _check(self, hello: dict[str, Any]) -> None:
        mine, node = self._identity, int(hello["node"])
        if (hello["run"], hello["attempt"]) != (mine.run, mine.attempt):
            raise Refusal(
                f"here meets {mine.run}, start {mine.attempt}, and not {hello['run']}, start "
                f"{hello['attempt']}",
                "another run has this port: stop it, or set clusters[0].network.port",
            )
        self._check_digest(str(hello["digest"]))
        if not 0 <= node < len(self._fleet.nodes):
            last = len(self._fleet.nodes) - 1
            raise Refusal(f"there is no node {node}", f"the nodes have the numbers 0 to {last}")
        for package, version in mine.versions.items():
            other = hello["versions"].get(package, "no version")
            if other != version:
                label = self._node(node).label
                raise Refusal(
                    f"{label} has {package} {other}, {self._fleet.head.name} has {version}",
                    f"install {package} {version} there, in "
                    + printable(str(hello.get("python", "its Python")), longest=_LONGEST_WHY),
                    ends_run=self._fleet.launcher == "ssh",
                )

    def _check_digest(self, digest: str) -> None:
        # Of what a person types, a part is enough; more than whoever does not know it is told.
        if len(digest) < _ENOUGH or not self._identity.digest.startswith(digest):
            raise Refusal(
                f"another run file: its digest begins with {digest[:12]}, here with "
                f"{self._identity.digest[:_SHOWN]}",
                "start all nodes from the same run",
            )


def say(line: str) -> None:
    """One line for the supervisor's log."""
    with suppress(OSError):  # its log may be on a disk that is full
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} supervisor: {line}\n")
        sys.stderr.flush()

"""Rendezvous server of the coordinator: authenticates agents, receives reports, sends orders.

The coordinator's own node, if it has one, is here as well, by a `DirectLink` in place of a socket.
"""

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
from isles.facts.units import printable
from isles.run.fleet import Fleet, FleetNode
from isles.run.pace import GONE_AFTER_S, HELLO_S, LOST_AFTER_S, SIGN_EVERY_S, Silence
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import write_record
from isles.run.wire import GREETING_BYTES, NotOurs, Wire, is_proof, new_challenge, proof

_SHOWN = 8
"""So many of them are told to who has another."""

_LONGEST_WHY = 300
_PAUSE_S = 0.2

_AT_ONCE = 64
"""So many connections may be unauthenticated; an agent proves itself within milliseconds."""

_LINES, _LINE_EVERY_S = 20, 10.0
"""So many lines about unknown connections are logged at once, and one more after so long."""

_LONGEST_LINE = 400
_RECORD_EVERY_S = 5.0


class DirectLink:
    """Connection of the coordinator to an agent in its own process, in place of a `Wire`."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = {}
        """The coordinator's last order; empty before the first."""

    def send(self, message: dict[str, Any]) -> None:
        """See Wire."""
        self.order = message["order"]

    def close(self) -> None:
        """See Wire."""


@dataclass(slots=True)
class NodeConnection:
    """An agent that has authenticated itself.

    Args:
        node: its number.
        agent: random id that this agent has chosen: another agent of the same node has another.
        process: of the agent.
        silence: since the last message.
        wire: the connection; None while it is broken.
        store: port of the agent's store, at which ranks can meet; 0: it has none.
        report: the last one about its ranks.
    """

    node: int
    agent: str
    process: ProcessId
    silence: Silence
    wire: Wire | DirectLink | None
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
    """What all nodes of an attempt must have in common.

    Args:
        run: the run's name.
        attempt: which start of it.
        digest: of resolved.yaml.
        versions: of isles and torch, on the first node.
        token: the secret of the attempt, by which agents prove themselves.
    """

    run: str
    attempt: int
    digest: str
    versions: dict[str, str]
    token: str = field(repr=False)


class RendezvousServer:
    """Takes in the nodes of one attempt and receives their reports.

    Args:
        listener: a socket that listens; None: all nodes are in this process.
        fleet: the nodes that are to come.
        identity: of this attempt.
        files: the run's files by name, for a node that does not share the run directory.
        clock: seconds that only ever grow, for the coordinator as well.
    """

    def __init__(
        self,
        listener: socket.socket | None,
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
        self._unknown = _UnknownConnections()
        self._is_closed = threading.Event()
        if listener is not None:
            threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def add_own(self, node: int, store: int) -> NodeConnection:
        """The agent in this process; its link is a `DirectLink`."""
        process = ProcessId.of(os.getpid())
        own = NodeConnection(node, "own", process, Silence(self.clock()), DirectLink(), store)
        with self._lock:
            self._peers[node] = own
        return own

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
            if peer.lost or peer.is_done or isinstance(peer.wire, DirectLink):
                continue
            if peer.wire is None and silent_s > GONE_AFTER_S:
                self.drop(peer, "its agent has ended without a word")
            elif silent_s > LOST_AFTER_S:
                self.drop(peer, f"it has not been heard of for {silent_s:.0f} s")

    def drop(self, peer: NodeConnection, why: str) -> None:
        """This node is lost; its agent is told so, should it still be there."""
        with self._lock:
            peer.lost = why
            self._dropped.add(peer.agent)
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
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for peer in self.peers().values():
            self._part(peer, peer.wire)

    def _node(self, number: int) -> FleetNode:
        return self._fleet.nodes[number]

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._is_closed.is_set():
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:  # closed, or for a moment this process has too many open files
                self._is_closed.wait(_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        wire = Wire(connection)
        self._unknown.add(wire)
        challenge = new_challenge()
        try:
            wire.send({"challenge": challenge})
            first = wire.receive(HELLO_S, GREETING_BYTES)
            self._unknown.remove(wire)
            if first is None:
                return
            if not is_proof(first.get("proof"), self._identity.token, challenge, "agent"):
                raise Refusal(
                    f"an agent at {address} does not know the token of this start of the run",
                    "start the agent with the token that `isles train` has printed or placed",
                )
            mine = {"proof": proof(self._identity.token, str(first["challenge"]), "coordinator")}
            if "fetch" in first:
                wire.send({"files": self._files(), **mine})
            else:
                self._receive(self._take_in(first["hello"], wire, mine), wire)
        except Refusal as refusal:
            self._unknown.log(f"refused {address}: {refusal.what}")
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
            self._unknown.log(f"{address} has sent what no node sends: {found}")
        finally:
            self._unknown.remove(wire)
            wire.close()

    def _receive(self, peer: NodeConnection, wire: Wire) -> None:
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

    def _part(self, peer: NodeConnection, wire: Wire | DirectLink | None) -> None:
        if wire is not None:
            wire.close()
        with self._lock:
            if peer.wire is wire and wire is not None:
                peer.wire = None
                # A process that has ended closes its connection: its silence begins here.
                peer.silence.heard()

    def _take_in(self, hello: dict[str, Any], wire: Wire, proof: dict[str, str]) -> NodeConnection:
        self._check(hello)
        process = ProcessId.from_record(hello["process"])
        if process is None:
            raise NotOurs("no process")
        agent, node = str(hello["agent"]), int(hello["node"])
        with self._lock:
            if agent in self._dropped:
                raise Refusal("this node was taken for lost", "it can join again as a new one")
            peer = self._peers.get(node)
            if peer is not None and peer.agent != agent and not peer.lost:
                if peer.wire is not None:
                    raise Refusal(
                        f"node {node} is there already: {peer.process.host}, process "
                        f"{peer.process.pid}",
                        "start each node once, each with its own number",
                    )
                peer.lost = "another agent has taken its place"
            if peer is None or peer.agent != agent:
                store = int(hello.get("store", 0))
                peer = NodeConnection(node, agent, process, Silence(self.clock()), None, store)
                self._peers[node] = peer
            # Before anybody can send an order here: it is the first word that the agent expects.
            wire.send({"welcome": {"pid": os.getpid()}, **proof})
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
        if digest != self._identity.digest:
            raise Refusal(
                f"another run file: its digest begins with {digest[:_SHOWN]}, here with "
                f"{self._identity.digest[:_SHOWN]}",
                "start all nodes from the same run",
            )


class _UnknownConnections:
    """Connections that have not authenticated themselves: few at once, and few lines about them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Wire, None] = {}
        self._lines = float(_LINES)
        self._logged_at = time.monotonic()
        self._dropped_lines = 0

    def add(self, wire: Wire) -> None:
        """One more; above the limit the oldest is closed."""
        with self._lock:
            self._waiting[wire] = None
            oldest = next(iter(self._waiting)) if len(self._waiting) > _AT_ONCE else None
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            oldest.hang_up()

    def remove(self, wire: Wire) -> None:
        """This one has proved itself, or has gone."""
        with self._lock:
            self._waiting.pop(wire, None)

    def log(self, line: str) -> None:
        """Log a line that may hold words of theirs; not every one, where they are many."""
        with self._lock:
            now = time.monotonic()
            self._lines = min(_LINES, self._lines + (now - self._logged_at) / _LINE_EVERY_S)
            self._logged_at = now
            if self._lines < 1.0:
                self._dropped_lines += 1
                return
            self._lines -= 1.0
            dropped, self._dropped_lines = self._dropped_lines, 0
        more = f" (and {dropped} more like it before)" if dropped else ""
        say(printable(line, keep="", longest=_LONGEST_LINE) + more)


class NodeRecords:
    """nodes.json and node-K.json of an attempt with several nodes: who is there, where."""

    def __init__(self, attempt: Attempt, fleet: Fleet, rendezvous: RendezvousServer) -> None:
        self._attempt = attempt
        self._fleet = fleet
        self._rendezvous = rendezvous
        self._written: list[dict[str, Any]] = []
        self._written_at = 0.0

    def write(self, places: dict[int, tuple[int, int]], *, now: bool = False) -> None:
        """Write what has changed, and all of it every few seconds.

        Args:
            places: first rank and number of ranks of the nodes that train.
            now: also if nothing has changed.
        """
        nodes = [self._node(node, places) for node in range(len(self._fleet.nodes))]
        is_late = time.monotonic() - self._written_at > _RECORD_EVERY_S
        if len(nodes) == 1 or (nodes == self._written and not is_late and not now):
            return
        old = {node["node"]: node for node in self._written}
        with suppress(OSError):  # a full disk: the run itself finds that out
            for node in nodes:
                if node.get("pid") and node != old.get(node["node"]):
                    write_record(self._attempt.node_record(node["node"]), node, durable=False)
            peers = self._rendezvous.peers()
            heard = {node: time.time() - peer.silence.seconds for node, peer in peers.items()}
            full = [{**node, "heard_at": heard.get(node["node"])} for node in nodes]
            record = {"at": time.time(), "launcher": self._fleet.launcher, "nodes": full}
            write_record(self._attempt.nodes, record, durable=False)
            self._written, self._written_at = nodes, time.monotonic()

    def _node(self, number: int, places: dict[int, tuple[int, int]]) -> dict[str, Any]:
        place, peer = self._fleet.nodes[number], self._rendezvous.peers().get(number)
        first, count = places.get(number, (None, place.nproc))
        node: dict[str, Any] = {
            "node": number,
            "name": place.name,
            "address": place.address,
            "ssh": place.ssh,
            "first_rank": first,
            "ranks": count,
            "state": "missing",
            "why": "",
        }
        if peer is not None:
            state = "lost" if peer.lost else "ended" if peer.is_done else "there"
            node |= {**peer.process.record(), "state": state, "why": peer.lost}
        return node


def say(line: str) -> None:
    """Write one line to the coordinator's log."""
    with suppress(OSError):  # its log may be on a disk that is full
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} coordinator: {line}\n")
        sys.stderr.flush()

"""Server of the coordinator: authenticates agents, receives reports, sends commands.

The agent in the coordinator's own process, if there is one, uses a `LocalLink` instead of a socket.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from isles.agent.protocol import (
    GONE_AFTER_S,
    GREETING_BYTES,
    HEARTBEAT_EVERY_S,
    HELLO_S,
    LOST_AFTER_S,
    LastSeen,
    ProtocolError,
    Wire,
    is_proof,
    log_line,
    new_challenge,
    proof,
)
from isles.errors import PreflightError
from isles.facts.units import printable
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import write_record
from isles.run.unauthenticated import Unauthenticated

_SHOWN = 8
"""Number of digits of a digest in messages."""

_LONGEST = 400
_PAUSE_S = 0.2

_LINES = 50
"""Maximum number of log lines about refused connections."""

_RECORD_EVERY_S = 5.0


class LocalLink:
    """Connection between the coordinator and the agent in its own process, for both of them.

    The coordinator uses it as a `Wire`, the agent as a `Connection` that never breaks.
    """

    state = "connected"
    why = ""
    may_return = False
    failure = None

    def __init__(self) -> None:
        self.command: dict[str, Any] = {}
        self.peer: NodeConnection | None = None

    def send(self, message: dict[str, Any]) -> None:
        self.command = message["command"]

    def report(self, report: dict[str, Any]) -> None:
        assert self.peer is not None
        self.peer.report = report

    def leave(self) -> None:
        assert self.peer is not None
        self.peer.is_done = True

    def reconnect(self) -> None:
        """Part of the interface of `Connection`; never called."""

    def close(self) -> None:
        """Close the link; part of the interface of `Wire`."""


@dataclass(slots=True)
class NodeConnection:
    """An authenticated agent.

    Args:
        agent: random id that this agent has chosen; another agent of the same node has another id.
        last_seen: seconds since its last message.
        wire: the connection; None while it is broken.
        store: port of the agent's store, which ranks can use to rendezvous; 0: it has none.
        address: address at which the other nodes reach it; empty: as in the run file.
    """

    node: int
    agent: str
    process: ProcessId
    last_seen: LastSeen
    wire: Wire | LocalLink | None
    store: int = 0
    address: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    """Why it was declared lost; empty if it was not."""
    is_done: bool = False
    """True if its agent has exited normally."""
    skew_s: float = 0.0
    """Its clock minus the clock of this host."""
    sent: dict[str, Any] = field(default_factory=dict)
    sent_at: float = 0.0

    @property
    def state(self) -> str:
        return "lost" if self.lost else "ended" if self.is_done else "there"

    @property
    def silent_s(self) -> float:
        """Seconds since its last message."""
        return 0.0 if isinstance(self.wire, LocalLink) else self.last_seen.seconds


class AgentRefusedError(PreflightError):
    """Reason to refuse an agent; `ends_run`: the run cannot start without this agent."""

    def __init__(self, what: str, fix: str, *, ends_run: bool = False) -> None:
        super().__init__(printable(what, keep="", longest=_LONGEST), fix=fix, id="start.refused")
        self.ends_run = ends_run


class RendezvousServer:
    """Accepts the agents of one attempt and receives their reports.

    Args:
        listener: a socket that listens; None: all nodes are in this process.
        nodes: all nodes of the attempt; an agent must have the same digest of resolved.yaml.
        run, attempt: name of the run, and number of this attempt.
        versions: versions of isles and torch on this host, which must be equal on all nodes.
        files: the run's files by name, for a node that does not share the run directory.
        clock: monotonic seconds, also used by the coordinator.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        nodes: Fleet,
        run: str,
        attempt: int,
        versions: dict[str, str],
        token: str,
        files: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.refused: AgentRefusedError | None = None
        """The last refusal."""
        self.fatal: AgentRefusedError | None = None
        """Refusal of a node that the run cannot start without."""
        self._listener = listener
        self._nodes = nodes
        self._run, self._attempt, self._versions, self._token = run, attempt, versions, token
        self._files = files
        self._lock = threading.Lock()
        self._peers: dict[int, NodeConnection] = {}
        self._dropped: set[str] = set()
        self._unauthenticated = Unauthenticated[Wire](Wire.close)
        self._num_lines = 0
        self._is_closed = threading.Event()
        if listener is not None:
            threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def add_own(self, store: int) -> LocalLink:
        link, process = LocalLink(), ProcessId.of(os.getpid())
        link.peer = NodeConnection(0, "own", process, LastSeen(self.clock()), link, store)
        with self._lock:
            self._peers[0] = link.peer
        return link

    def peers(self) -> dict[int, NodeConnection]:
        """All agents that have ever connected, by node; lost agents too."""
        with self._lock:
            return dict(self._peers)

    def connected(self) -> list[int]:
        """Numbers of the nodes that have connected and are not lost."""
        return sorted(node for node, peer in self.peers().items() if not peer.lost)

    def label(self, node: int) -> str:
        peer = self.peers().get(node)
        if self._nodes.launcher == "local" and peer is not None:
            return f"node {node} ({peer.process.host}, agent {peer.process.pid})"
        return self.place(node).label

    def place(self, node: int) -> FleetNode:
        """A node, with the host of its current or last agent."""
        known, peer = self._nodes[node], self.peers().get(node)
        if peer is None or peer.address in ("", known.address):
            return known
        return replace(known, name=peer.process.host, address=peer.address)

    def look(self, now_s: float) -> None:
        """Declare nodes lost that have sent nothing for too long."""
        for peer in self.peers().values():
            silent_s = peer.last_seen.look(now_s)
            if peer.lost or peer.is_done or isinstance(peer.wire, LocalLink):
                continue
            if peer.wire is None and silent_s > GONE_AFTER_S:
                self.drop(peer, "its agent exited without notice")
            elif silent_s > LOST_AFTER_S:
                self.drop(peer, f"no message from it for {silent_s:.0f} s")

    def drop(self, peer: NodeConnection, why: str) -> None:
        """Declare a node lost; if its agent is still running, the agent notices and exits."""
        with self._lock:
            peer.lost = why
            self._dropped.add(peer.agent)
        log_line(f"{self.label(peer.node)} is lost: {why}")
        self._disconnect(peer, peer.wire)

    def command(self, node: int, command: dict[str, Any], now_s: float) -> None:
        """Send a node its command if the command is new, and again as a heartbeat."""
        peer = self.peers().get(node)
        # Read once: the thread that receives from this node may remove it at any time.
        wire = peer.wire if peer is not None else None
        if peer is None or wire is None:
            return
        if command == peer.sent and now_s - peer.sent_at < HEARTBEAT_EVERY_S:
            return
        try:
            wire.send({"command": command})
        except OSError:
            self._disconnect(peer, wire)
            return
        peer.sent, peer.sent_at = command, now_s

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._is_closed.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for peer in self.peers().values():
            self._disconnect(peer, peer.wire)

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._is_closed.is_set():
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:  # closed, or this process has too many open files for a moment
                self._is_closed.wait(_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        wire, challenge = Wire(connection), new_challenge()
        self._unauthenticated.add(wire, address)
        try:
            wire.send({"challenge": challenge})
            first = wire.receive(HELLO_S, GREETING_BYTES)
            self._unauthenticated.forget(wire)
            if first is None:
                return
            if not is_proof(first.get("proof"), self._token, challenge, "agent"):
                raise AgentRefusedError(
                    f"an agent at {address} does not know the token of this attempt",
                    "start the agent with the token that `isles train` has printed or placed. If "
                    "the run is running already, isles refuses a second attempt; see isles status "
                    "and isles stop",
                )
            mine = {"proof": proof(self._token, str(first["challenge"]), "coordinator")}
            if "fetch" in first:
                wire.send({"files": self._files(), **mine})
            else:
                self._receive(self._take_in(first["hello"], wire, mine), wire)
        except AgentRefusedError as refusal:
            self._log(f"refused {address}: {refusal.what}")
            self.refused = refusal
            self.fatal = refusal if refusal.ends_run else self.fatal
            where = f"{self._nodes.meets_at} port {self._nodes.port}"
            record = {"what": refusal.what, "where": where, "fix": refusal.fix, "id": refusal.id}
            with suppress(OSError):
                wire.send({"refused": {**record, "exit_code": int(refusal.exit_code)}})
        except OSError:
            pass  # it has closed the connection, or it is a port scan
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self._log(f"{address} sent an invalid message: {error!r:.200}")
        finally:
            self._unauthenticated.forget(wire)
            wire.close()

    def _log(self, line: str) -> None:
        # A line that may contain text of an unknown connection, up to a maximum number of lines.
        self._num_lines += 1
        if self._num_lines <= _LINES:
            log_line(printable(line, keep="", longest=_LONGEST))

    def _receive(self, peer: NodeConnection, wire: Wire) -> None:
        try:
            while True:
                message = wire.receive(LOST_AFTER_S)
                if peer.wire is not wire:
                    return
                if message is None:
                    continue  # `look` decides how long a node may be silent
                peer.last_seen.reset()
                report = message["report"]
                if not isinstance(report, dict):
                    raise ProtocolError("no report")
                skew_s = time.time() - float(message.get("clock", time.time()))
                peer.skew_s = -skew_s
                for error in (report.get("root_cause"), *report.get("errors", ())):
                    if error:  # convert to the clock of this host, as for all nodes
                        error["at"] = float(error["at"]) + skew_s
                peer.report = report
                if message.get("bye"):
                    peer.is_done = True
                    return
        finally:
            self._disconnect(peer, wire)

    def _disconnect(self, peer: NodeConnection, wire: Wire | LocalLink | None) -> None:
        if wire is None:
            return
        wire.close()
        with self._lock:
            if peer.wire is wire:
                peer.wire = None
                # A process that exits closes its connection; its silence starts now.
                peer.last_seen.reset()

    def _take_in(self, hello: dict[str, Any], wire: Wire, proof: dict[str, str]) -> NodeConnection:
        self._check(hello)
        process = ProcessId.from_record(hello["process"])
        if process is None:
            raise ProtocolError("no process")
        agent, node = str(hello["agent"]), int(hello["node"])
        with self._lock:
            if agent in self._dropped:
                raise AgentRefusedError(
                    "this node was declared lost", "it can rejoin as a new node"
                )
            peer = self._peers.get(node)
            if peer is not None and peer.agent != agent and not peer.lost:
                if peer.wire is not None:
                    raise AgentRefusedError(
                        f"node {node} is connected already: {peer.process.host}, process "
                        f"{peer.process.pid}",
                        "start each node once, with its own number",
                    )
                peer.lost = "another agent has replaced it"
            if peer is None or peer.agent != agent:
                store = int(hello.get("store", 0))
                peer = NodeConnection(node, agent, process, LastSeen(self.clock()), None, store)
                peer.address = str(hello.get("address", ""))
                self._peers[node] = peer
            # Before any command can be sent: the agent expects this message first.
            wire.send({"welcome": True, **proof})
            old, peer.wire, peer.sent = peer.wire, wire, {}
            peer.last_seen.reset()
        if old is not None and old is not wire:
            old.close()
        return peer

    def _check(self, hello: dict[str, Any]) -> None:
        nodes, node, digest = self._nodes, int(hello["node"]), str(hello["digest"])
        if (hello["run"], hello["attempt"]) != (self._run, self._attempt):
            raise AgentRefusedError(
                f"this coordinator runs {self._run}, attempt {self._attempt}, not {hello['run']}, "
                f"attempt {hello['attempt']}",
                "another run uses this port: stop it, or set clusters.0.network.port",
            )
        if digest != nodes.digest:
            raise AgentRefusedError(
                f"the run file differs: its digest begins with {digest[:_SHOWN]}, the "
                f"coordinator's with {nodes.digest[:_SHOWN]}",
                "start all nodes from the same run",
            )
        if not 0 <= node < len(nodes):
            fix = f"use a number from 0 to {len(nodes) - 1}"
            raise AgentRefusedError(f"node {node} does not exist", fix)
        for package, version in self._versions.items():
            other = hello["versions"].get(package, "no version")
            if other != version:
                python = printable(str(hello.get("python", "its Python")), longest=_LONGEST)
                raise AgentRefusedError(
                    f"{nodes[node].label} has {package} {other}, {nodes.first.name} has {version}",
                    f"install {package} {version} there, for {python}",
                    ends_run=nodes.launcher in ("ray", "skypilot", "ssh"),
                )


class NodeRecords:
    """nodes.json and node-K.json of an attempt of several nodes: which nodes are connected, and
    where."""

    def __init__(self, attempt: Attempt, nodes: Fleet, server: RendezvousServer) -> None:
        self._attempt = attempt
        self._nodes = nodes
        self._server = server
        self._written: list[dict[str, Any]] = []
        self._written_at = 0.0

    def write(self, places: dict[int, tuple[int, int]], *, now: bool = False) -> None:
        """Write changed records, and all records every few seconds or if `now`.

        `places`: first rank and number of ranks of the nodes that train.
        """
        if len(self._nodes) == 1:
            return
        peers = self._server.peers()
        nodes = [
            self._node(self._server.place(each.node), places, peers.get(each.node))
            for each in self._nodes
        ]
        is_late = time.monotonic() - self._written_at > _RECORD_EVERY_S
        if nodes == self._written and not is_late and not now:
            return
        with suppress(OSError):  # a full disk: the run itself detects that
            for node in nodes:
                if node.get("pid") and node not in self._written:
                    write_record(self._attempt.node_record(node["node"]), node, durable=False)
            seen = {
                # An agent in this process sends no heartbeats.
                node: time.time() - (0.0 if peer.process.is_me() else peer.last_seen.seconds)
                for node, peer in peers.items()
            }
            full = [{**node, "last_seen_at": seen.get(node["node"])} for node in nodes]
            record = {"at": time.time(), "launcher": self._nodes.launcher, "nodes": full}
            write_record(self._attempt.nodes, record, durable=False)
            self._written, self._written_at = nodes, time.monotonic()

    def _node(
        self, place: FleetNode, places: dict[int, tuple[int, int]], peer: NodeConnection | None
    ) -> dict[str, Any]:
        first, count = places.get(place.node, (None, place.nproc))
        node = {"node": place.node, "name": place.name, "address": place.address, "ssh": place.ssh}
        node |= {"first_rank": first, "ranks": count, "state": "missing", "why": ""}
        if peer is not None:
            node |= {**peer.process.record(), "state": peer.state, "why": peer.lost}
        return node

"""A coordinator and its server without a process of their own; the agents are played by the test,
over real sockets."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles.agent.connection import Connection
from isles.agent.coordinator import Coordinator
from isles.agent.protocol import Wire, authenticate
from isles.agent.server import RendezvousServer
from isles.errors import ExitCode
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from tests.deadline import DEADLINE_S, until
from tests.runs import bare_run

VERSIONS = {"isles": "1", "torch": "2"}
TOKEN = "a secret of this attempt"


@dataclass
class Clock:
    """Seconds that a test may put forward."""

    late_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.late_s


@dataclass
class Table:
    """A coordinator that the test has look at its nodes."""

    run_dir: RunDir
    attempt: Attempt
    fleet: Fleet
    server: RendezvousServer
    coordinator: Coordinator
    clock: Clock
    connections: list[Connection] = field(default_factory=list)

    def look_until(self, condition: Callable[[], Any], what: str) -> Any:
        """Go on supervising until something is so."""

        def look() -> Any:
            self.coordinator.look()
            return condition()

        return until(look, what)

    def hello(self, node: int, **other: Any) -> dict[str, Any]:
        """The first message of an agent."""
        run = {"run": self.run_dir.name, "attempt": self.attempt.number}
        process = ProcessId.of(os.getpid()).record()
        place = {"digest": self.fleet.digest, "node": node, "process": process}
        return {**run, **place, "versions": VERSIONS, "agent": "t", **other}

    def join(self, node: int, **other: Any) -> Connection:
        """An agent that comes."""
        connection = dial(self.fleet.port, self.hello(node, **other))
        connection.report({"restart": -1, "state": "idle"})
        self.connections.append(connection)
        return connection

    def join_silently(self, node: int) -> Wire:
        """An agent of which nothing is heard but its first message."""
        wire, answer = ask(self.fleet.port, {"hello": self.hello(node)})
        assert "welcome" in answer
        return wire

    def begin(self, *nodes: int) -> list[Connection]:
        """Agents that come, and start their ranks as they are told to."""
        connections = [self.join(node) for node in nodes]
        self.run(*connections)
        return connections

    def run(self, *connections: Connection) -> None:
        """These agents start their ranks once they are told to."""
        self._look_until_all("run", connections)
        for connection in connections:
            connection.report({"restart": connection.command["restart"], "state": "running"})

    def end(self, *connections: Connection) -> dict[str, Any]:
        """The outcome, once there is one, and these agents know it."""
        self.look_until(lambda: self.coordinator.is_over, "the run has its outcome")
        self._look_until_all("over", connections)
        return read_record(self.attempt.outcome) or {}

    def _look_until_all(self, phase: str, connections: tuple[Connection, ...]) -> None:
        self.look_until(lambda: all(c.command.get("phase") == phase for c in connections), phase)


def error_of(
    rank: int, at: float, what: str = "fault", *, is_communication: bool = False, **more: Any
) -> dict[str, Any]:
    """The error record that a rank has left."""
    code = ExitCode.COMMUNICATION if is_communication else ExitCode.TRAINING
    place = {"rank": rank, "host": f"h{rank}", "where": "", "fix": "", "exit_code": int(code)}
    return {**place, "at": at, "what": what, "is_communication": is_communication, **more}


def plain(port: int) -> socket.socket:
    """A connection that sends nothing by itself."""
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def ask(port: int, message: dict[str, Any], token: str = TOKEN) -> tuple[Wire, Any]:
    """A connection with this first message, and the answer to it."""
    wire = Wire(plain(port))
    return wire, authenticate(wire, message, token, DEADLINE_S)


def dial(port: int, hello: dict[str, Any], wait_s: float = DEADLINE_S) -> Connection:
    """The connection of an agent."""
    address = "127.0.0.1", port
    return Connection("h0", address, hello, TOKEN, start_timeout_s=wait_s, may_return=False)


@contextmanager
def table(
    path: Path, num: int = 2, least: int | None = None, addresses: str = "10.0.0.{}"
) -> Iterator[Table]:
    """Node N has N + 1 ranks; they wait 20 s for one another."""
    run_dir = bare_run(path / "runs" / "x-1")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    listener, clock = socket.create_server(("127.0.0.1", 0)), Clock()
    port, files = listener.getsockname()[1], {"run": "x-1"}
    nodes = tuple(FleetNode(n, f"h{n}", None, addresses.format(n), n + 1) for n in range(num))
    digest = hashlib.sha256(run_dir.resolved.read_bytes()).hexdigest()
    fleet = Fleet("manual", nodes, port, least or num, "cpu", 20.0, digest)
    server = RendezvousServer(listener, fleet, "x-1", 1, VERSIONS, TOKEN, lambda: files, clock)
    coordinator = Coordinator(run_dir, attempt, fleet, server, max_restarts=3, save_timeout_s=60.0)
    made = Table(run_dir, attempt, fleet, server, coordinator, clock)
    try:
        yield made
    finally:
        for connection in made.connections:
            connection.leave()
        server.close()

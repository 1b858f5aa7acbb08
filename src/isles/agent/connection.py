"""An agent's connection to the coordinator, and the run's files that it fetches."""

from __future__ import annotations

import importlib.metadata
import math
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Literal

from isles import __version__
from isles.agent.protocol import (
    GONE_AFTER_S,
    HEARTBEAT_EVERY_S,
    LOST_AFTER_S,
    RECONNECT_AFTER_S,
    WAITING_EVERY_S,
    LastSeen,
    ProtocolError,
    Wire,
    authenticate,
    log_line,
)
from isles.errors import CommunicationError, PreflightError, UserError
from isles.facts.units import printable
from isles.launch.ssh.node import make_place
from isles.run.nodes import Fleet
from isles.run.paths import Attempt, RunDir
from isles.run.records import explain_write_errors

_ANSWER_S = 4.0
"""Longest wait for a connection, and for an answer on a new connection, before the next try."""
_LOOK_S = 0.05
_RETRY_S = 0.2

_FETCH_S = 600.0
"""Longest wait for the coordinator: people start the nodes one after another."""

State = Literal["seeking", "connected", "cut off", "refused"]


class Connection:
    """The connection to the coordinator; reconnects if the connection breaks.

    Args:
        address: host and port of the coordinator.
        hello: identity of this node; see `RendezvousServer`.
        start_timeout_s: longest wait for the coordinator at the start, and, if `may_return`, once
            more after the connection was lost.
        may_return: whether the run continues without this node, which may then rejoin.
    """

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        hello: dict[str, Any],
        token: str,
        *,
        start_timeout_s: float,
        may_return: bool,
    ) -> None:
        self.may_return = may_return
        self.state: State = "seeking"
        self.command: dict[str, Any] = {}
        """The coordinator's last command; empty before the first."""
        self.why = ""
        """Why the connection was lost for good."""
        self.failure: UserError | None = None
        """Why the coordinator refused this node."""
        self._address = address
        at = f"{address[0]}:{address[1]}"
        self._coordinator = at if name in ("", address[0]) else f"{name} ({at})"
        self._hello = hello
        self._token = token
        self._start_timeout_s = start_timeout_s
        self._report: dict[str, Any] = {}
        self._logged = ""
        self._is_leaving = False
        self._start()

    def report(self, report: dict[str, Any]) -> None:
        """Send the coordinator the state of the ranks; repeated every second."""
        self._report = report

    def reconnect(self) -> None:
        """Look for the coordinator again, as a new agent; the ranks must have ended."""
        self._thread.join(_ANSWER_S)  # it has noticed the loss; two threads would compete
        self.command = {}
        self.state = "seeking"
        self._start()

    def leave(self) -> None:
        """Tell the coordinator that this agent exits normally."""
        self._is_leaving = True
        self._thread.join(_ANSWER_S)

    def _start(self) -> None:
        self._agent = uuid.uuid4().hex
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Runs until this node leaves, is refused, or loses the coordinator.
        search = _Search(self._coordinator, self._address, self._start_timeout_s)
        hello = {"hello": {**self._hello, "agent": self._agent}}
        last_seen = LastSeen(time.monotonic())
        refused_s = 0.0
        while not self._is_leaving and self.state in ("seeking", "connected"):
            try:
                wire, _ = _connect(self._address, hello, self._token)
                refused_s = 0.0
                self.state = "connected"
                last_seen.reset()
                self._exchange(wire, last_seen)
            except UserError as error:
                self._refuse(error)
            except (OSError, ProtocolError) as error:
                refused_s += _RETRY_S if isinstance(error, ConnectionRefusedError) else 0.0
                if self.state == "seeking" and (failure := search.failed(error)) is not None:
                    self._refuse(failure)
                time.sleep(_RETRY_S)
            silent_s = last_seen.look(time.monotonic())
            if self.state == "connected" and refused_s > GONE_AFTER_S:
                # Final: the run is over, and there is nothing to rejoin.
                self.may_return = False
                gone = f"the coordinator on {self._coordinator}"
                self._cut_off(f"{gone}, is gone")
            elif self.state == "connected" and silent_s > LOST_AFTER_S:
                self._cut_off(f"no message from {self._coordinator} for {silent_s:.0f} s")

    def _exchange(self, wire: Wire, last_seen: LastSeen) -> None:
        # Receive commands and send reports until the connection ends.
        sent: dict[str, Any] = {}
        sent_at = -math.inf
        try:
            while True:
                message = wire.receive(_LOOK_S)
                now_s = time.monotonic()
                if message is not None:
                    last_seen.reset()
                    self.command = message.get("command", self.command)
                    self._log(str(self.command.get("waiting", "")))
                if self._is_leaving:
                    wire.send({"report": self._report, "clock": time.time(), "bye": True})
                    return
                report = self._report
                if report != sent or now_s - sent_at > HEARTBEAT_EVERY_S:
                    wire.send({"report": report, "clock": time.time()})
                    sent, sent_at = report, now_s
                if last_seen.look(now_s) > RECONNECT_AFTER_S:
                    return
        finally:
            wire.close()

    def _log(self, line: str) -> None:
        if line and line != self._logged:
            log_line(line, "agent")
        self._logged = line

    def _cut_off(self, why: str) -> None:
        self.why = why
        self.state = "cut off"  # last: the agent's thread waits for it

    def _refuse(self, error: UserError) -> None:
        if self.state == "connected" and "declared lost" in error.what:
            self._cut_off(f"{self._coordinator} has declared this node lost")
        else:
            self.failure = error
            self.state = "refused"


class _Search:
    """Search for the coordinator: log lines while it lasts, and an error at its end."""

    def __init__(self, coordinator: str, address: tuple[str, int], timeout_s: float) -> None:
        self._coordinator, self._address = coordinator, address
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._num_logged = 0

    def failed(self, why: Exception) -> UserError | None:
        """Note a failed try; returns the error if it was the last try."""
        waited_s = time.monotonic() - self._began
        if waited_s <= self._timeout_s:
            if waited_s // WAITING_EVERY_S > self._num_logged:
                self._num_logged += 1
                line = f"waiting for the coordinator at {self._coordinator} ({waited_s:.0f} s)"
                log_line(f"{line}: {why}", "agent")
            return None
        host, port = self._address
        where = f"host {socket.gethostname()}"
        if isinstance(why, ProtocolError):
            return CommunicationError(
                f"another program listens at {self._coordinator}, not the coordinator of this run "
                f"({why})",
                where=where,
                fix=f"find the program with `ss -ltnp | grep {port}` there, or use another port: "
                "set clusters.0.network.port",
                id="port.unknown",
            )
        return CommunicationError(
            f"the coordinator at {self._coordinator} did not answer within {self._timeout_s:.0f} s "
            f"({why})",
            where=where,
            fix="check that the first node is started and not frozen, and that its port is open: "
            f"nc -vz {host} {port}",
            id="start.timeout",
        )


def _connect(
    address: tuple[str, int], message: dict[str, Any], token: str
) -> tuple[Wire, dict[str, Any]]:
    # An authenticated connection, and the coordinator's answer; errors as in `authenticate`.
    wire = Wire(socket.create_connection(address, timeout=_ANSWER_S))
    try:
        return wire, authenticate(wire, message, token, _ANSWER_S)
    except BaseException:
        wire.close()
        raise


def versions() -> dict[str, str]:
    """Versions of isles and torch, which must be the same on all nodes; torch is not imported."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {"isles": __version__, "torch": torch}


def ask_token() -> str:
    """Read the token of an attempt from standard input, so that it is never on a command line."""
    if sys.stdin.isatty():
        sys.stderr.write("token of this attempt, as printed by `isles train`: ")
        sys.stderr.flush()
    return sys.stdin.readline().strip()


def fetch_run(
    target: str,
    token: str,
    node: int | None,
    output_dir: Path | None,
    timeout_s: float = _FETCH_S,
) -> tuple[RunDir, Attempt]:
    """Get the files of a run from its coordinator, and write them to a folder on this node.

    `output_dir`: parent of that folder; None: as in the run file. UserError: the coordinator does
    not answer in time, or this host cannot take part.
    """
    # A node that has the files needs no config classes, which are slow to import.
    from isles.config.resolve import load_resolved
    from isles.launch.manual import node_environ

    files = _fetch(target, token, timeout_s)
    if files.get("isles") != __version__:
        raise PreflightError(
            f"the first node has isles {printable(str(files.get('isles')), longest=40)}, this host "
            f"has {__version__}",
            where=f"host {socket.gethostname()}",
            fix="install the same version of isles on both hosts (on this host, for "
            f"{sys.executable})",
            id="version.isles",
        )
    nodes = Fleet.of(files["fleet"])
    if node is None or not 0 < node < len(nodes):
        raise UserError(
            f"node {node} does not exist",
            where="--node",
            fix=f"use a number from 1 to {len(nodes) - 1}",
        )
    # The coordinator has proved that it knows the token, so its files are trusted.
    config = load_resolved(files["resolved"]).config
    folder = (output_dir or Path(config.output_dir)).expanduser().absolute()
    run_dir = RunDir(folder / files["run"])
    attempt = run_dir.attempt(int(files["attempt"]))
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    make_place(run_dir, attempt, {**files, "token": token})
    os.environ.update(node_environ(run_dir, nodes, node))
    return run_dir, attempt


def _fetch(target: str, token: str, timeout_s: float) -> dict[str, Any]:
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"{target} is neither a run directory nor HOST:PORT",
            where="python -m isles.agent",
            fix="use the command exactly as `isles train` printed it",
        )
    search = _Search(target, (host, int(port)), timeout_s)
    while True:
        try:
            wire, answer = _connect((host, int(port)), {"fetch": True}, token)
            wire.close()
            return dict(answer["files"])
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: an invalid message, or an invalid host name
            if (failure := search.failed(error)) is not None:
                raise failure from error
        time.sleep(_RETRY_S)

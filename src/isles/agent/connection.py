"""An agent's side of the protocol: its connection to the coordinator, and the files of a run."""

from __future__ import annotations

import hashlib
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
    HELLO_S,
    LOST_AFTER_S,
    RECONNECT_AFTER_S,
    WAITING_EVERY_S,
    LastSeen,
    ProtocolError,
    Wire,
    authenticate,
    log_line,
)
from isles.config.resolve import load_resolved
from isles.errors import CommunicationError, PreflightError, UserError
from isles.facts.units import printable
from isles.launch.manual import node_environ
from isles.launch.ssh.node import make_place
from isles.run.nodes import Fleet
from isles.run.paths import Attempt, RunDir
from isles.run.records import clear_errors

_CONNECT_S = 2.0
_LOOK_S = 0.05
_RETRY_S = 0.2
_UNKNOWN_S = 4.0
"""How long another program on the port is tried again."""

_FETCH_S = 600.0
"""Longest wait for the coordinator: people type the commands of the nodes one after another."""

_MUTE = "somebody there takes the connection, and says nothing"
"""Another program does, and a coordinator that is frozen for a while: no reason to give up."""

State = Literal["seeking", "connected", "cut off", "refused"]


class Connection:
    """Keeps the connection to the coordinator, and opens it again where it breaks.

    Args:
        name: of the coordinator's host.
        address: host and port at which the coordinator listens.
        hello: who this node is; see `RendezvousServer`.
        token: the secret of the attempt.
        start_timeout_s: longest wait for the coordinator at the start, and, where `may_return`,
            once more after the connection was lost.
        may_return: whether the run goes on without this node, which may then come back.
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
        """Why the connection is cut off."""
        self.failure: UserError | None = None
        """Why the coordinator has refused this node."""
        self._address = address
        at = f"{address[0]}:{address[1]}"
        self._coordinator = at if name in ("", address[0]) else f"{name} ({at})"
        self._hello = hello
        self._token = token
        self._start_timeout_s = start_timeout_s
        self._report: dict[str, Any] = {}
        self._logged = ""
        self._is_mute = False
        self._is_leaving = False
        self._start()

    def report(self, report: dict[str, Any]) -> None:
        """Send the coordinator the state of the ranks; repeated every second."""
        self._report = report

    def reconnect(self) -> None:
        """Seek the coordinator again, as another agent; the ranks must have ended."""
        self._thread.join(_CONNECT_S)  # it has seen the cut; two of them would take turns
        self.command = {}
        self.state = "seeking"
        self._start()

    def leave(self) -> None:
        """Tell the coordinator that this agent ends in good order."""
        self._is_leaving = True
        self._thread.join(_CONNECT_S)

    def _start(self) -> None:
        self._agent = uuid.uuid4().hex
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Until this node leaves, is refused, or is cut off.
        last_seen = LastSeen(time.monotonic())
        unknown_since: float | None = None
        refused_s = 0.0
        while not self._is_leaving and self.state in ("seeking", "connected"):
            try:
                wire = self._connect(last_seen)
                refused_s = 0.0
                self._exchange(wire, last_seen)
            except UserError as error:
                self._refuse(error)
            except ProtocolError as error:
                unknown_since = unknown_since or time.monotonic()
                is_late = time.monotonic() - unknown_since > _UNKNOWN_S
                if is_late and self.state == "seeking":
                    self._refuse(self._unknown(error))
                time.sleep(_RETRY_S)
            except ConnectionRefusedError:
                refused_s += _RETRY_S
                time.sleep(_RETRY_S)
            except OSError:
                time.sleep(_LOOK_S)
            self._look(last_seen.look(time.monotonic()), refused_s)

    def _look(self, silent_s: float, refused_s: float) -> None:
        waits = int(silent_s // WAITING_EVERY_S)
        if self.state == "seeking" and waits:
            mute = f": {_MUTE}" if self._is_mute else ""
            waited_s = waits * WAITING_EVERY_S
            self._log(
                f"waiting for the coordinator at {self._coordinator} ({waited_s:.0f} s){mute}"
            )
        if self.state == "connected" and refused_s > GONE_AFTER_S:
            # For good: the run is over, and there is nothing to return to.
            self.may_return = False
            self._cut_off(
                f"the coordinator on {self._coordinator}, through which the nodes meet, is gone"
            )
        elif self.state == "connected" and silent_s > LOST_AFTER_S:
            self._cut_off(f"{self._coordinator} has not been heard of for {silent_s:.0f} s")
        elif self.state == "seeking" and silent_s > self._start_timeout_s:
            self._refuse(self._unanswered())

    def _connect(self, last_seen: LastSeen) -> Wire:
        wire = Wire(socket.create_connection(self._address, timeout=_CONNECT_S))
        try:
            answer = self._greet(wire, last_seen)
        except OSError as error:
            wire.close()
            if self.state == "seeking" and isinstance(error, ConnectionResetError):
                # A host that has died answers nothing; somebody has hung up.
                raise ProtocolError("it hangs up") from error
            raise
        except BaseException:
            wire.close()
            raise
        self._is_mute = answer is None
        if answer is None:
            wire.close()
            raise TimeoutError(_MUTE)
        return wire

    def _greet(self, wire: Wire, last_seen: LastSeen) -> Any:
        # The coordinator's welcome; a time in which this process was frozen does not count.
        deadline = time.monotonic() + HELLO_S
        while time.monotonic() < deadline and not wire.has_message(_CONNECT_S / 4):
            silent_s = last_seen.look(time.monotonic())
            if self._is_leaving or (self.state == "seeking" and silent_s > self._start_timeout_s):
                return None
        hello = {"hello": {**self._hello, "agent": self._agent}}
        left_s = max(_CONNECT_S, deadline - time.monotonic())
        return authenticate(wire, hello, self._token, left_s)

    def _exchange(self, wire: Wire, last_seen: LastSeen) -> None:
        # Receive commands and send reports until the connection ends.
        self.state = "connected"
        last_seen.reset()
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
        if self.state == "connected" and "taken for lost" in error.what:
            self._cut_off(f"{self._coordinator} has taken this node for lost")
        else:
            self.failure = error
            self.state = "refused"

    def _unanswered(self) -> UserError:
        address, port = self._address
        fix = f"is the first node started, and is its port open? try: nc -vz {address} {port}"
        if self._is_mute:
            fix = f"is it frozen, or has another program its port? there: ss -ltnp | grep {port}"
        return CommunicationError(
            f"no coordinator has answered at {self._coordinator} within "
            f"{self._start_timeout_s:.0f} s" + (f": {_MUTE}" if self._is_mute else ""),
            where=f"host {socket.gethostname()}",
            fix=fix,
            id="start.timeout",
        )

    def _unknown(self, error: Exception) -> UserError:
        return CommunicationError(
            f"what listens at {self._coordinator} is not the coordinator of this run: {error}",
            where=f"host {socket.gethostname()}",
            fix="another program has this port: see `ss -ltnp` there, and set "
            "clusters[0].network.port",
            id="port.unknown",
        )


def versions() -> dict[str, str]:
    """Versions of isles and torch, which must be the same on all nodes; torch is not imported."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {"isles": __version__, "torch": torch}


def ask_token() -> str:
    """The token of an attempt, from standard input: it never stands on a command line."""
    if sys.stdin.isatty():
        sys.stderr.write("token of this start of the run, as `isles train` has printed it: ")
        sys.stderr.flush()
    return sys.stdin.readline().strip()


def fetch_run(
    target: str,
    token: str,
    node: int | None,
    output_dir: Path | None,
    timeout_s: float = _FETCH_S,
) -> tuple[RunDir, Attempt]:
    """Get the files of a run from its coordinator, and make this node's own folder of it.

    Args:
        target: HOST:PORT of the coordinator.
        token: the secret of the attempt.
        node: this node's number.
        output_dir: where the folder of the run is made; None: as the run file says.
        timeout_s: longest wait for the coordinator.

    Raises:
        UserError: the coordinator does not answer in time, has another run, or this host cannot
            take part.
    """
    files = _fetch(target, token, timeout_s)
    if files.get("isles") != __version__:
        raise PreflightError(
            f"the first node has isles {printable(str(files.get('isles')), longest=40)}, this host "
            f"has {__version__}",
            where=f"host {socket.gethostname()}",
            fix=f"install the same isles on both; here, in {sys.executable}",
            id="version.isles",
        )
    nodes = _checked_nodes(files, target)
    if node is None or not 0 < node < len(nodes):
        raise UserError(
            f"there is no node {node} to join",
            where="--node",
            fix=f"the others have the numbers 1 to {len(nodes) - 1}",
        )
    config = load_resolved(files["resolved"]).config
    folder = (output_dir or Path(config.output_dir)).expanduser().absolute()
    run_dir = RunDir(folder / files["run"])
    attempt = run_dir.attempt(int(files["attempt"]))
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    make_place(run_dir, attempt, {**files, "token": token})
    os.environ.update(node_environ(run_dir, nodes, node))
    return run_dir, attempt


def _checked_nodes(files: dict[str, Any], target: str) -> Fleet:
    try:
        run = files["run"]
        nodes = Fleet.of(files["fleet"])
        is_right = nodes.digest == hashlib.sha256(files["resolved"].encode()).hexdigest()
        # A name that is one folder, and shown by ls: nothing is written outside of output_dir.
        is_right = is_right and Path(run).name == run and run.isprintable() and run[0] != "."
        is_right = is_right and int(files["attempt"]) > 0 and isinstance(files["text"], str)
        is_right = is_right and len(nodes) > 0 and "begun_at" in files and "born_at" in files
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise PreflightError(
            f"what {target} has sent is no run of isles",
            where=f"host {socket.gethostname()}",
            fix="type the command again as `isles train` has printed it",
            id="start.refused",
        )
    return nodes


def _fetch(target: str, token: str, timeout_s: float) -> dict[str, Any]:
    address, _, port = target.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"{target} is neither a run directory nor HOST:PORT",
            where="python -m isles.agent",
            fix="type the command as `isles train` has printed it",
        )
    began = logged_at = time.monotonic()
    while True:
        left_s = timeout_s - (time.monotonic() - began)
        try:
            wire = Wire(socket.create_connection((address, int(port)), timeout=_CONNECT_S))
            try:
                answer = authenticate(wire, {"fetch": True}, token, min(HELLO_S, max(1.0, left_s)))
            finally:
                wire.close()
            if answer is not None and isinstance(answer.get("files"), dict):
                return dict(answer["files"])
            last = "it does not talk as isles does: has another program this port?"
        except (OSError, ValueError) as error:  # ValueError: no message of ours, no name of a host
            last = str(error)
        now = time.monotonic()
        if now - began > timeout_s:
            break
        if now - logged_at > WAITING_EVERY_S:
            logged_at = now
            log_line(f"waiting for the first node at {target}: {last} ({left_s:.0f} s)", "agent")
        time.sleep(_RETRY_S)
    raise CommunicationError(
        f"the first node has not answered at {target} within {timeout_s:.0f} s: {last}",
        where=f"host {socket.gethostname()}",
        fix=f"type its command there, and see that its port is open: nc -vz {address} {port}",
        id="net.connect",
    )

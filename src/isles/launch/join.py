"""Joining a run by hand: a node that knows only where the first one is, and the run's digest."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles import __version__
from isles.config.resolve import load_resolved
from isles.errors import CommunicationError, PreflightError, UserError
from isles.facts.text import printable
from isles.launch.detached import start_detached
from isles.launch.manual import node_environ
from isles.launch.node.place import make_place
from isles.run.fleet import Fleet
from isles.run.pace import HELLO_S
from isles.run.paths import Attempt, RunDir
from isles.run.refusals import clear_errors
from isles.run.wire import NotOurs, Wire, refusal

_CONNECT_S = 2.0
_LOOK_S = 0.2
_SAY_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Joined:
    """A node that was started here.

    Args:
        run_dir, attempt: its folder on this host.
        process: its agent.
        log: what the agent prints.
    """

    run_dir: RunDir
    attempt: Attempt
    process: subprocess.Popen[bytes]
    log: Path


def join(
    target: str, node: int, digest: str, *, output_dir: Path | None, timeout_s: float, say: Any
) -> Joined:
    """Get a run's files from its first node, and start the agent of one node here.

    Args:
        target: HOST:PORT of the first node.
        node: this node's number.
        digest: how the digest of the run's values begins; nobody else's can be taken.
        output_dir: where the folder of the run is made; None: as the run file says.
        timeout_s: longest wait for the first node.
        say: takes lines for the user.

    Raises:
        UserError: the first node does not answer in time, has another run, or this host cannot
            take part.
    """
    files = _fetch(target, digest, timeout_s, say)
    if files.get("isles") != __version__:
        raise PreflightError(
            f"the first node has isles {printable(str(files.get('isles')), longest=40)}, this host "
            f"has {__version__}",
            where=f"host {socket.gethostname()}",
            fix=f"install the same isles on both; here, in {sys.executable}",
            id="version.isles",
        )
    fleet = _checked(files, target, digest)
    if not 0 < node < len(fleet.nodes):
        raise UserError(
            f"there is no node {node} to join",
            where="--node",
            fix=f"the others have the numbers 1 to {len(fleet.nodes) - 1}",
        )
    config = load_resolved(files["resolved"]).config
    folder = (output_dir or Path(config.output_dir)).expanduser().absolute()
    run_dir = RunDir(folder / files["run"])
    attempt = run_dir.attempt(int(files["attempt"]))
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    make_place(run_dir, attempt, files)
    command = [sys.executable, "-m", "isles.agent", str(run_dir.path)]
    command += ["--attempt", str(attempt.number), "--node", str(node)]
    log = attempt.node_log(node)
    with clear_errors(log), log.open("ab") as stream:
        environ = node_environ(run_dir, fleet, node)
        process = start_detached(command, environ, stream, attempt.path)
    return Joined(run_dir, attempt, process, log)


def _checked(files: dict[str, Any], target: str, digest: str) -> Fleet:
    """The nodes, from files of which nothing leads out of the folder where runs are.

    Raises:
        PreflightError: they are not those of this run.
    """
    try:
        run, resolved = files["run"], files["resolved"]
        found = hashlib.sha256(resolved.encode()).hexdigest()
        fleet = Fleet.of(files["fleet"])
        is_right = found.startswith(digest) and fleet.digest == found
        # A name that is one folder, and shown by ls.
        is_right = is_right and Path(run).name == run and run.isprintable() and run[0] != "."
        is_right = is_right and int(files["attempt"]) > 0 and isinstance(files["text"], str)
        is_right = is_right and bool(fleet.nodes) and "begun_at" in files and "born_at" in files
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise PreflightError(
            f"what {target} has sent is not the run whose digest begins with {digest}",
            where=f"host {socket.gethostname()}",
            fix="type the command again as `isles train` has printed it",
            id="start.refused",
        )
    return fleet


def _fetch(target: str, digest: str, timeout_s: float, say: Any) -> dict[str, Any]:
    """The files of a run from its supervisor."""
    address, _, port = target.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"{target} is neither a run directory nor HOST:PORT",
            where="isles join-node",
            fix="type the command as `isles train` has printed it",
        )
    began = said_at = time.monotonic()
    while True:
        try:
            left_s = max(1.0, timeout_s - (time.monotonic() - began))
            return _ask(address, int(port), digest, min(HELLO_S, left_s))
        except (OSError, ValueError) as error:  # ValueError: no message of ours, no name of a host
            last = error
        now = time.monotonic()
        if now - began > timeout_s:
            break
        if now - said_at > _SAY_EVERY_S:
            said_at = now
            say(f"waiting for the first node at {target}: {last} ({timeout_s - now + began:.0f} s)")
        time.sleep(_LOOK_S)
    raise CommunicationError(
        f"the first node has not answered at {target} within {timeout_s:.0f} s: {last}",
        where=f"host {socket.gethostname()}",
        fix=f"type its command there, and see that its port is open: nc -vz {address} {port}",
        id="net.connect",
    )


def _ask(address: str, port: int, digest: str, timeout_s: float) -> dict[str, Any]:
    wire = Wire(socket.create_connection((address, port), timeout=_CONNECT_S))
    try:
        wire.send({"fetch": digest})
        answer = wire.receive(timeout_s)
    finally:
        wire.close()
    if answer is None:
        raise NotOurs("it is there and says nothing: has another program this port?")
    if "refused" in answer:
        raise refusal(answer["refused"])
    files = answer.get("files")
    if not isinstance(files, dict):
        raise NotOurs("it does not talk as isles does: has another program this port?")
    return files

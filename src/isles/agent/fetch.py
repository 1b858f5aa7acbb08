"""The files of a run for a node that does not share the run directory: from the coordinator."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from isles import __version__
from isles.agent.connection import authenticate, say
from isles.config.resolve import load_resolved
from isles.errors import CommunicationError, PreflightError, UserError
from isles.facts.text import printable
from isles.launch.manual import node_environ
from isles.launch.ssh.node import make_place
from isles.run.fleet import Fleet
from isles.run.pace import HELLO_S
from isles.run.paths import Attempt, RunDir
from isles.run.refusals import clear_errors
from isles.run.wire import NotOurs, Wire

_CONNECT_S = 2.0
_LOOK_S = 0.2
_SAY_EVERY_S = 5.0
_WAIT_S = 600.0
"""Longest wait for the coordinator: people type the commands of the nodes one after another."""


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
    timeout_s: float = _WAIT_S,
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
    fleet = _checked(files, target)
    if node is None or not 0 < node < len(fleet.nodes):
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
    make_place(run_dir, attempt, {**files, "token": token})
    os.environ.update(node_environ(run_dir, fleet, node))
    return run_dir, attempt


def _checked(files: dict[str, Any], target: str) -> Fleet:
    """The nodes, from files of which nothing leads out of the folder where runs are.

    Raises:
        PreflightError: they are not those of this run.
    """
    try:
        run, resolved = files["run"], files["resolved"]
        found = hashlib.sha256(resolved.encode()).hexdigest()
        fleet = Fleet.of(files["fleet"])
        is_right = fleet.digest == found
        # A name that is one folder, and shown by ls.
        is_right = is_right and Path(run).name == run and run.isprintable() and run[0] != "."
        is_right = is_right and int(files["attempt"]) > 0 and isinstance(files["text"], str)
        is_right = is_right and bool(fleet.nodes) and "begun_at" in files and "born_at" in files
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise PreflightError(
            f"what {target} has sent is no run of isles",
            where=f"host {socket.gethostname()}",
            fix="type the command again as `isles train` has printed it",
            id="start.refused",
        )
    return fleet


def _fetch(target: str, token: str, timeout_s: float) -> dict[str, Any]:
    address, _, port = target.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"{target} is neither a run directory nor HOST:PORT",
            where="python -m isles.agent",
            fix="type the command as `isles train` has printed it",
        )
    began = said_at = time.monotonic()
    while True:
        try:
            left_s = max(1.0, timeout_s - (time.monotonic() - began))
            return _ask(address, int(port), token, min(HELLO_S, left_s))
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


def _ask(address: str, port: int, token: str, timeout_s: float) -> dict[str, Any]:
    wire = Wire(socket.create_connection((address, port), timeout=_CONNECT_S))
    try:
        answer = authenticate(wire, {"fetch": True}, token, timeout_s)
    finally:
        wire.close()
    if answer is None:
        raise NotOurs("it is there and says nothing: has another program this port?")
    files = answer.get("files")
    if not isinstance(files, dict):
        raise NotOurs("it does not talk as isles does: has another program this port?")
    return files

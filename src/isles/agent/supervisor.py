"""Holds a run of several nodes together: `python -m isles.agent.supervisor RUN_DIR …`.

It is the process that `isles status` and `isles stop` know. The nodes meet at it; it decides what
they do, and keeps the records of the run. On one machine, and for the first node of a run that is
started by hand, it starts the agents itself. Were it killed, the agents would end too.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from isles import __version__
from isles.config.resolve import load_resolved
from isles.errors import ExitCode
from isles.run.fleet import Fleet, read_fleet
from isles.run.nodes import Meeting, start_node
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.agent.__main__ import versions
from isles.agent.coordinator import Coordinator
from isles.agent.failure import trouble, write_failure
from isles.agent.members import Terms
from isles.agent.presence import Presence
from isles.agent.server import Identity, RendezvousServer, say

_LOOK_S = 0.05
_END_S = 10.0


def main() -> int:
    """Supervise a run to its end; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.agent.supervisor")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--nodes", help="MIN:MAX, where all are processes of this machine")
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume-from", type=Path)
    options = parser.parse_args()
    run_dir = RunDir(options.run_dir.absolute())
    attempt = run_dir.attempt(options.attempt)
    fleet = read_fleet(attempt)
    try:
        if fleet is not None:
            listener = socket.create_server((fleet.head.address, fleet.port))
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            fleet = _meet_here(attempt, options, int(listener.getsockname()[1]))
    except OSError as error:
        assert fleet is not None
        return _cannot_listen(attempt, fleet, error)
    return Supervisor(run_dir, attempt, fleet, listener).run()


def _meet_here(attempt: Attempt, options: argparse.Namespace, port: int) -> Fleet:
    """The nodes of a run of which all are processes of this machine."""
    least, _, most = options.nodes.partition(":")
    cluster = load_resolved(
        RunDir(options.run_dir.absolute()).resolved.read_text(encoding="utf-8")
    ).config.clusters[0]
    meeting = Meeting(
        address="127.0.0.1",
        port=port,
        min_nodes=int(least),
        max_nodes=int(most),
        nproc_per_node=options.nproc_per_node,
        device=options.device,
        resume_from=str(options.resume_from) if options.resume_from else None,
        supervisor=ProcessId.of(os.getpid()).record(),
        start_timeout_s=cluster.start_timeout,
    )
    meeting.write(attempt)
    return meeting.fleet()


def _cannot_listen(attempt: Attempt, fleet: Fleet, error: OSError) -> int:
    head = fleet.head
    at = f"{head.address}:{fleet.port}"
    if error.errno == errno.EADDRINUSE:
        what = f"the port {fleet.port} of {head.name} ({head.address}) is taken"
        fix = f"`ss -ltnp | grep {fleet.port}` there says by whom; set clusters[0].network.port"
    elif error.errno == errno.EADDRNOTAVAIL:
        what = f"{head.name} has no address {head.address}, at which the other nodes should meet it"
        fix = "`ip -brief address` there lists those it has; correct the first of launcher.hosts"
    else:
        what, fix = f"cannot listen at {at}: {error.strerror}", "set clusters[0].network.port"
    say(what)
    write_failure(attempt, trouble(what, fix, id="port.taken"))
    return int(ExitCode.COMMUNICATION)


class Supervisor:
    """One run's meeting place, agents and signals."""

    def __init__(
        self, run_dir: RunDir, attempt: Attempt, fleet: Fleet, listener: socket.socket
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._fleet = fleet
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        config = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
        digest = hashlib.sha256(run_dir.resolved.read_bytes()).hexdigest()
        identity = Identity(run_dir.name, attempt.number, digest, versions())
        self._rendezvous = RendezvousServer(listener, fleet, identity, self._files)
        terms = Terms(
            max_restarts=config.clusters[0].max_restarts,
            save_timeout_s=config.checkpoint.timeout,
            needs_head=fleet.launcher != "local",
            is_script=config.training.script is not None,
        )
        self._coordinator = Coordinator(run_dir, attempt, fleet, terms, self._rendezvous)
        self._presence = Presence(attempt, fleet, self._rendezvous)

    def run(self) -> int:
        """Bring the nodes together, and wait for their end; returns the run's exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)
        nodes = {"local": range(len(self._fleet.nodes)), "manual": range(1)}
        for node in nodes.get(self._fleet.launcher, ()):
            self._children[node] = start_node(self._run_dir, self._attempt, node)
        pause = threading.Event()
        while not self._coordinator.has_ended():
            self._coordinator.look()
            self._presence.note(self._coordinator.places())
            self._miss_children()
            pause.wait(_LOOK_S)
        self._presence.note(self._coordinator.places(), now=True)
        self._rendezvous.close()
        self._end_children()
        self._coordinator.close()
        return self._coordinator.exit_code

    def _miss_children(self) -> None:
        """An agent that was started here and has ended before it came will not come."""
        if self._coordinator.is_over:
            return
        peers = self._rendezvous.peers()
        codes = {node: child.poll() for node, child in self._children.items()}
        ended = {n: code for n, code in codes.items() if code is not None and n not in peers}
        if not ended or (self._fleet.is_elastic and len(ended) < len(self._children)):
            return
        words = ", ".join(f"node {node} ended with {code}" for node, code in ended.items())
        logs = ", ".join(str(self._attempt.node_log(node)) for node in ended)
        what = f"nodes of this run have ended before it began: {words}"
        fix = f"their last words: {logs}"
        self._coordinator.fail(trouble(what, fix, ExitCode.TRAINING, id="start.failed"))

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._coordinator.ask_to_stop(number)

    def _end_children(self) -> None:
        deadline = time.monotonic() + _END_S
        for node, child in self._children.items():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"the agent of node {node} ({child.pid}) has not ended; it is killed")
                child.kill()

    def _files(self) -> dict[str, Any]:
        """What a node that is started by hand gets from here."""
        launch = read_record(self._attempt.launch) or {}
        attempts = self._run_dir.attempts()
        first = read_record(attempts[0].launch) or {} if attempts else {}
        return {
            "isles": __version__,
            "run": self._run_dir.name,
            "run_dir": str(self._run_dir.path),
            "attempt": self._attempt.number,
            "resolved": self._run_dir.resolved.read_text(encoding="utf-8"),
            "text": self._run_dir.run_file.read_text(encoding="utf-8"),
            "fleet": self._fleet.record(),
            "begun_at": launch.get("begun_at"),
            "born_at": first.get("begun_at"),
        }


if __name__ == "__main__":
    sys.exit(main())

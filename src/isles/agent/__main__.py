"""Agent of one node, and coordinator of the run where it is the first: `python -m isles.agent`.

    python -m isles.agent RUN_DIR              the coordinator: the first node, or a job's script
    python -m isles.agent RUN_DIR --node K     the agent of a node that has the run's files
    python -m isles.agent HOST:PORT --node K   one that gets them from the coordinator

Launchers start it. The first node's process is the coordinator as well; in a job of a queue, and
where several nodes are processes of one machine, the coordinator is a process of its own, which
places the agents. SIGINT and SIGTERM save and stop on all nodes, whichever of them they reach.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil

from isles.agent.agent import Agent
from isles.agent.connection import Connection, Head, OwnConnection, versions
from isles.agent.hang import StallsHere
from isles.agent.lead import Lead
from isles.agent.node_log import NodeLog
from isles.agent.relay import SignalRelay
from isles.agent.workers import MeetingPlace, Node, WorkerGroup
from isles.errors import UserError
from isles.run.env import ATTEMPT, RUN_DIR, job_node, rank_defaults
from isles.run.fleet import Fleet, FleetNode, known_fleet
from isles.run.outcome import agent_error, end_failed
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId

_LONGEST_FOLDER = 70
"""Letters of a folder in which a Unix socket still has room: its whole path has 107 at most."""


def main() -> int:
    """Run to the end of the attempt; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.agent")
    parser.add_argument("target", help="RUN_DIR, or HOST:PORT of the coordinator")
    parser.add_argument("--attempt", type=int, help="left out: the newest")
    parser.add_argument("--node", type=int, help="left out: the first, or as the job says")
    parser.add_argument("--fleet", type=Path, help="the nodes, where a job's coordinator has them")
    parser.add_argument("--log", help="takes what this prints; %%n: the number of the node")
    parser.add_argument("--check", metavar="HOST:PORT", help="only check this node of a job")
    parser.add_argument("--only-check", type=float, metavar="SECONDS", help="and start nothing")
    parser.add_argument("--output-dir", type=Path, help="where a run that comes from there is put")
    options = parser.parse_args()
    try:
        if ":" in options.target and not Path(options.target).exists():
            from isles.agent.fetch import ask_token, fetch_run

            token, folder = ask_token(), options.output_dir
            run_dir, attempt = fetch_run(options.target, token, options.node, folder)
        else:
            run_dir = RunDir(Path(options.target).absolute())
            attempt = _attempt(run_dir, options.attempt)
        if options.fleet is None and options.node is None:
            return _lead(run_dir, attempt, options.only_check)
        fleet = known_fleet(attempt, options.fleet)
        place = _place(fleet, options.node, attempt)
        if options.log:
            _print_to(options.log.replace("%n", str(place.node)))
        if options.check:
            _become_check(run_dir, attempt, fleet, place, options.check, options.only_check)
        return _run(run_dir, attempt, fleet, place)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)


def _lead(run_dir: RunDir, attempt: Attempt, only_check: float | None) -> int:
    """Coordinate the run, with the agent of the first node in this process where it has one."""
    relay = SignalRelay(attempt)
    relay.install()
    lead = Lead(run_dir, attempt, relay)
    code = lead.open(only_check_s=only_check)
    if code is not None:
        return code
    if lead.fleet.has_own_node:
        place = lead.fleet.nodes[0]
        store = None if len(lead.fleet.nodes) == 1 else _store(lead.fleet, place)
        own = lead.rendezvous.add_own(0, store.port if store else 0)
        lead.start()
        _serve(run_dir, attempt, lead.fleet, place, relay, OwnConnection(own), store)
    else:
        lead.start()
    return lead.join()


def _run(run_dir: RunDir, attempt: Attempt, fleet: Fleet, place: FleetNode) -> int:
    """The agent of a node whose coordinator is another process."""
    relay = SignalRelay(attempt)
    relay.install()
    store = _store(fleet, place) if fleet.may_be_first(place.node) else None
    # First of all: the others wait for this node, and not for what it must import.
    connection = Connection(
        Head(fleet.head.name, fleet.head.address, fleet.port),
        {**_hello(run_dir, attempt, place), "store": store.port if store else 0},
        attempt.token.read_text(encoding="utf-8").strip(),
        start_timeout_s=fleet.start_timeout_s,
        may_return=fleet.is_elastic,
    )
    code = _serve(run_dir, attempt, fleet, place, relay, connection, store)
    if connection.state == "cut off" and fleet.is_shared and not attempt.outcome.exists():
        # The coordinator is gone, and cannot say how the run has ended.
        fix = "it was killed, or the machine ran out of memory: see `dmesg | tail` there"
        end_failed(attempt, agent_error(connection.why, fix, id="run.coordinator"))
    return code


def _serve(
    run_dir: RunDir,
    attempt: Attempt,
    fleet: Fleet,
    place: FleetNode,
    relay: SignalRelay,
    connection: Connection | OwnConnection,
    store: MeetingPlace | None,
) -> int:
    """Do what the coordinator orders, to the end of the run."""
    interface = place.interface or _interface(place.address)
    os.environ.update(rank_defaults(device=fleet.device, nproc=place.nproc, interface=interface))
    is_own = isinstance(connection, OwnConnection)
    agent_log = attempt.agent_log if is_own else attempt.node_log(place.node)
    log = NodeLog(run_dir, attempt, place.node, lambda: relay.ranks, agent_log)
    with log, _ready_to_fork(run_dir, attempt) as scratch:
        node = Node(run_dir, attempt, place.nproc, scratch, in_job=fleet.in_job)
        workers = WorkerGroup(node, relay, store)
        try:
            stalls = StallsHere(attempt, is_shared=is_own or fleet.is_shared)
            return Agent(connection, workers, relay, stalls).run()
        finally:
            if store is not None:
                store.close()


def _store(fleet: Fleet, place: FleetNode) -> MeetingPlace | None:
    """Where the ranks of all nodes meet if this node is the first of those that train."""
    try:
        return MeetingPlace(place.address)
    except OSError:
        return None  # this machine has no such address: the coordinator says so


@contextmanager
def _ready_to_fork(run_dir: RunDir, attempt: Attempt) -> Iterator[Path]:
    """The server from which the ranks are forked; gives a folder for their files."""
    # multiprocessing's socket goes there: its path must not be longer than the kernel allows.
    is_long = len(tempfile.gettempdir()) > _LONGEST_FOLDER
    with tempfile.TemporaryDirectory(prefix="isles-", dir="/tmp" if is_long else None) as scratch:
        process: Any = multiprocessing.current_process()
        process._config["tempdir"] = scratch
        os.environ[RUN_DIR] = str(run_dir.path)
        os.environ[ATTEMPT] = str(attempt.number)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
        # The fork server imports torch and the model's code once for all ranks, of all restarts;
        # this process never does.
        forkserver.set_forkserver_preload(["isles.train.preload"])
        forkserver.ensure_running()
        yield Path(scratch)


def _attempt(run_dir: RunDir, number: int | None) -> Attempt:
    attempt = run_dir.last_attempt() if number is None else run_dir.attempt(number)
    if attempt is None:
        raise UserError(
            "this run was never started", where=str(run_dir.path), fix="`isles train` starts it"
        )
    if not run_dir.resolved.exists():
        raise UserError(
            f"{os.uname().nodename} does not see the run directory {run_dir.path}",
            where=f"host {os.uname().nodename}",
            fix="set output_dir to a folder that all nodes share",
            id="files.output",
        )
    return attempt


def _place(fleet: Fleet, wanted: int | None, attempt: Attempt) -> FleetNode:
    node = wanted if wanted is not None else job_node([node.name for node in fleet.nodes])
    if node is None or not 0 <= node < len(fleet.nodes):
        raise UserError(
            f"this run has {len(fleet.nodes)} nodes, and none of them is "
            f"{os.uname().nodename if node is None else node}",
            where=str(attempt.fleet),
            fix=f"give --node, 0 to {len(fleet.nodes) - 1}",
            id="start.refused",
        )
    return fleet.nodes[node]


def _print_to(path: str) -> None:
    """From now on all that this process prints goes to a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _become_check(
    run_dir: RunDir,
    attempt: Attempt,
    fleet: Fleet,
    place: FleetNode,
    master: str,
    timeout_s: float | None,
) -> None:
    """Let the check of this node take the place of this process."""
    words = [sys.executable, "-m", "isles.check.step", str(run_dir.path)]
    words += ["--attempt", str(attempt.number), "--node", str(place.node)]
    words += ["--hosts", ",".join(node.name for node in fleet.nodes), "--master", master]
    words += ["--timeout", f"{timeout_s:.0f}"] if timeout_s is not None else []
    os.execv(sys.executable, words)


def _hello(run_dir: RunDir, attempt: Attempt, place: FleetNode) -> dict[str, Any]:
    """Who this node is, for the coordinator to compare."""
    return {
        "run": run_dir.name,
        "attempt": attempt.number,
        "digest": hashlib.sha256(run_dir.resolved.read_bytes()).hexdigest(),
        "node": place.node,
        "process": ProcessId.of(os.getpid()).record(),
        "versions": versions(),
        "python": sys.executable,
    }


def _interface(address: str) -> str | None:
    """The network interface that has an address of this machine."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


if __name__ == "__main__":
    sys.exit(main())

"""Starts the ranks of one node: `python -m isles.agent RUN_DIR …`.

On one machine the local launcher runs it, with `--nproc-per-node`. Where a run has several nodes,
one agent on each of them meets the others at the supervisor; `RUN_DIR` is enough to bring back a
node of one machine, also typed by hand. SIGINT and SIGTERM let the ranks save and stop.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil

from isles import __version__
from isles.errors import ExitCode, UserError
from isles.run.env import ATTEMPT, RUN_DIR, rank_defaults, visible_devices
from isles.run.fleet import Fleet, FleetNode, read_fleet
from isles.run.nodes import Meeting, claim_node, read_meeting
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.stop_request import read_stop_request
from isles.agent.connection import Contact, Head
from isles.agent.forked import MeetingPlace
from isles.agent.node_log import NodeLog
from isles.agent.relay import SignalRelay

_LOOK_S = 0.5

_LONGEST_FOLDER = 70
"""Letters of a folder in which a Unix socket still has room: its whole path has 107 at most."""


def main() -> int:
    """Run the ranks to their end; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, help="left out: the newest")
    parser.add_argument("--nproc-per-node", type=int, help="for a run of one node")
    parser.add_argument("--node", type=int, help="for a run of several; left out: a free one")
    parser.add_argument("--resume-from", type=Path)
    options = parser.parse_args()
    try:
        run_dir = RunDir(options.run_dir.absolute())
        attempt = _attempt(run_dir, options.attempt)
        if options.nproc_per_node is not None:
            return _run_alone(run_dir, attempt, options.nproc_per_node, options.resume_from)
        return _run_member(run_dir, attempt, options.node)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)


def _run_alone(run_dir: RunDir, attempt: Attempt, nproc: int, resume_from: Path | None) -> int:
    """The one node of a run."""
    relay = SignalRelay(attempt)
    relay.install()
    threading.Thread(target=_obey_requests, args=(attempt, relay), daemon=True).start()
    log = NodeLog(run_dir, attempt, 0, lambda: relay.ranks, attempt.agent_log)
    with log, _ready_to_fork(run_dir, attempt) as scratch:
        from isles.config.resolve import load_resolved
        from isles.agent.alone import Alone
        from isles.agent.workers import Gang

        config = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
        gang = Gang(run_dir, attempt, nproc, "127.0.0.1", scratch)
        is_script = config.training.script is not None
        alone = Alone(gang, is_script, config.clusters[0].max_restarts, resume_from)
        return alone.run(relay)


def _run_member(run_dir: RunDir, attempt: Attempt, wanted: int | None) -> int:
    """One of several nodes."""
    relay = SignalRelay(attempt)
    relay.install(is_member=True)
    fleet = read_fleet(attempt)
    if fleet is not None:
        place = _place_in_fleet(attempt, fleet, wanted)
    else:
        fleet, place = _place_here(attempt, wanted)
    head = Head(fleet.head.name, fleet.head.address, fleet.port)
    meeting_place = _meeting_place(fleet, place)
    # First of all: the others wait for this node, and not for what it must import.
    contact = Contact(
        head,
        {**_hello(run_dir, attempt, place), "store": meeting_place.port if meeting_place else 0},
        start_timeout_s=fleet.start_timeout_s,
        may_return=fleet.is_elastic and (place.node > 0 or fleet.launcher == "local"),
    )
    added = rank_defaults(device=fleet.device, nproc=place.nproc, interface=_interface(place))
    os.environ.update(added)
    node_log = attempt.node_log(place.node)
    log = NodeLog(run_dir, attempt, place.node, lambda: relay.ranks, node_log)
    with log, _ready_to_fork(run_dir, attempt) as scratch:
        from isles.agent.hang import StallsHere
        from isles.agent.agent import Member
        from isles.agent.workers import Gang, WorkerGroup

        gang = Gang(run_dir, attempt, place.nproc, place.address, scratch)
        worker_group = WorkerGroup(gang, relay, meeting_place)
        member = Member(contact, worker_group, relay, StallsHere(attempt))
        try:
            code = member.run()
        finally:
            if meeting_place is not None:
                meeting_place.close()
    if contact.state == "cut off" and place.node == 0 and fleet.launcher != "local":
        _conclude(attempt, contact)
    return code


def _meeting_place(fleet: Fleet, place: FleetNode) -> MeetingPlace | None:
    """Where the ranks meet if this node is the first of those that begin; None: it never is."""
    if place.node > 0 and fleet.launcher != "local":
        return None
    try:
        return MeetingPlace(place.address)
    except OSError:
        return None  # this machine has no such address: the supervisor, which is here, says so


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
        forkserver.set_forkserver_preload(["isles.agent.preload"])
        forkserver.ensure_running()
        yield Path(scratch)


def _attempt(run_dir: RunDir, number: int | None) -> Attempt:
    attempt = run_dir.last_attempt() if number is None else run_dir.attempt(number)
    if attempt is None:
        raise UserError(
            "this run was never started", where=str(run_dir.path), fix="`isles train` starts it"
        )
    return attempt


def _place_in_fleet(attempt: Attempt, fleet: Fleet, wanted: int | None) -> FleetNode:
    if wanted is None or not 0 <= wanted < len(fleet.nodes):
        raise UserError(
            f"this run has {len(fleet.nodes)} nodes, and none of them is {wanted}",
            where=str(attempt.fleet),
            fix=f"give --node, 0 to {len(fleet.nodes) - 1}",
            id="start.refused",
        )
    return fleet.nodes[wanted]


def _place_here(attempt: Attempt, wanted: int | None) -> tuple[Fleet, FleetNode]:
    """Take a place among the nodes of a run that is on its way on this machine."""
    meeting = read_meeting(attempt)
    if meeting is None or attempt.outcome.exists():
        is_over = "is over" if meeting else "has one node only"
        raise UserError(
            f"this start of the run {is_over}: no node can join it",
            where=str(attempt.path),
            fix="`isles train` with its run file starts it again; clusters[0].nodes: MIN:MAX "
            "makes room for more nodes",
            id="start.refused",
        )
    supervisor = meeting.supervisor_process
    if supervisor.is_here() and not supervisor.is_alive():
        raise UserError(
            f"the supervisor of this run (pid {supervisor.pid}) is gone: no node can join it",
            where=f"host {supervisor.host}",
            fix="`isles train` with its run file starts the run again",
            id="run.supervisor",
        )
    node = claim_node(attempt, meeting, wanted)
    if meeting.device == "cuda":
        _take_gpus(node, meeting)
    fleet = meeting.fleet()
    return fleet, fleet.nodes[node]


def _take_gpus(node: int, meeting: Meeting) -> None:
    """Each node of one machine has GPUs of its own."""
    last = (node + 1) * meeting.nproc_per_node
    visible = visible_devices() or [str(gpu) for gpu in range(last)]
    mine = visible[last - meeting.nproc_per_node : last]
    if len(mine) < meeting.nproc_per_node:
        raise UserError(
            f"node {node} needs {meeting.nproc_per_node} GPUs of its own, {len(mine)} are left",
            where=f"host {os.uname().nodename}, CUDA_VISIBLE_DEVICES={','.join(visible)}",
            fix="make all GPUs of the run visible, or lower clusters[0].nodes",
            id="gpu.count",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def _hello(run_dir: RunDir, attempt: Attempt, place: FleetNode) -> dict[str, Any]:
    """Who this node is, for the supervisor to compare."""
    return {
        "run": run_dir.name,
        "attempt": attempt.number,
        "digest": hashlib.sha256(run_dir.resolved.read_bytes()).hexdigest(),
        "node": place.node,
        "process": ProcessId.of(os.getpid()).record(),
        "versions": versions(),
        "python": sys.executable,
    }


def versions() -> dict[str, str]:
    """What must be the same on all nodes; found out without importing it."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {"isles": __version__, "torch": torch}


def _interface(place: FleetNode) -> str | None:
    """The network interface that has this node's address."""
    if place.interface is not None:
        return place.interface
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == place.address for address in addresses):
            return name
    return None


def _obey_requests(attempt: Attempt, relay: SignalRelay) -> None:
    """A stop request that was left in the attempt is as good as a signal."""
    pause = threading.Event()
    told = 0
    while not pause.wait(_LOOK_S):
        request = read_stop_request(attempt)
        if request is None:
            continue
        if request.kind == "now":
            _end_at_once(attempt)
        number = signal.SIGINT if request.kind == "interrupt" else signal.SIGTERM
        if number != told:
            told = number
            os.kill(os.getpid(), number)


def _end_at_once(attempt: Attempt) -> None:
    """End the ranks without saving; this process, whose end they follow, too."""
    from isles.run.restarts import newest_step
    from isles.agent.failure import write_stop

    with suppress(OSError):  # a full disk must not keep anybody from stopping
        write_stop(attempt, ExitCode.INTERRUPTED, newest_step(RunDir(attempt.path.parent.parent)))
    kill_all(psutil.Process().children(recursive=True))
    os._exit(ExitCode.INTERRUPTED)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill these; some may be gone with the others already."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _conclude(attempt: Attempt, contact: Contact) -> None:
    """The supervisor is gone and cannot say how the run ended: the head's own node does."""
    from isles.agent.failure import trouble, write_failure

    if not attempt.outcome.exists():
        fix = "it was killed, or the machine ran out of memory: see `dmesg | tail`"
        write_failure(attempt, trouble(contact.why, fix, id="run.supervisor"))


if __name__ == "__main__":
    sys.exit(main())

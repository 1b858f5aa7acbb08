"""The nodes of a run that has several on one machine: where they meet, and which are there."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isles.errors import UserError
from isles.run.fleet import Fleet, FleetNode
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record, write_record


@dataclass(frozen=True, slots=True)
class Meeting:
    """What an agent must know to join a run.

    Args:
        address, port: where the supervisor listens.
        min_nodes, max_nodes: how many nodes the run may have.
        nproc_per_node: ranks on each.
        device: cpu or cuda.
        resume_from: the checkpoint that was asked for by name.
        supervisor: the process at which the nodes meet, as a record.
        start_timeout_s: longest wait for all nodes at the start.
    """

    address: str
    port: int
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    device: str
    resume_from: str | None
    supervisor: dict[str, Any]
    start_timeout_s: float = 120.0

    def fleet(self) -> Fleet:
        """The same, as agents on several hosts take it."""
        return Fleet(
            launcher="local",
            nodes=tuple(
                FleetNode(node, os.uname().nodename, None, self.address, self.nproc_per_node)
                for node in range(self.max_nodes)
            ),
            port=self.port,
            min_nodes=self.min_nodes,
            device=self.device,
            start_timeout_s=self.start_timeout_s,
            digest="",
            resume_from=self.resume_from,
        )

    @property
    def supervisor_process(self) -> ProcessId:
        """The process at which the nodes meet: the run ends with it."""
        process = ProcessId.from_record(self.supervisor)
        assert process is not None
        return process

    def write(self, attempt: Attempt) -> None:
        """Tell the nodes."""
        write_record(attempt.meeting, asdict(self))


def read_meeting(attempt: Attempt) -> Meeting | None:
    """Where the nodes of an attempt meet; None where it has one node."""
    record = read_record(attempt.meeting)
    return Meeting(**record) if record is not None else None


def node_process(attempt: Attempt, node: int) -> ProcessId | None:
    """The agent that has this place, alive or not; None where nobody has taken it."""
    record = read_record(attempt.node_record(node))
    return ProcessId.from_record(record) if record is not None else None


def living_nodes(attempt: Attempt, max_nodes: int) -> list[int]:
    """Places whose agent runs, as far as this host can tell."""
    found = []
    for node in range(max_nodes):
        process = node_process(attempt, node)
        # An agent on another host is taken for alive: only its own host can tell.
        if process is not None and (not process.is_here() or process.is_alive()):
            found.append(node)
    return found


def claim_node(attempt: Attempt, meeting: Meeting, wanted: int | None) -> int:
    """Take a place for this process: the wanted one, or the first that is free.

    Raises:
        UserError: it is taken, or all are.
    """
    with _locked(attempt.path / ".nodes.lock"):
        taken = living_nodes(attempt, meeting.max_nodes)
        free = [node for node in range(meeting.max_nodes) if node not in taken]
        if wanted is not None and wanted not in free:
            raise UserError(
                f"there is no free place for node {wanted} of {meeting.max_nodes}",
                where=str(attempt.node_record(wanted)),
                fix="leave out --node to take the first free place",
                id="start.refused",
            )
        if not free:
            raise UserError(
                f"all {meeting.max_nodes} nodes of this run are there",
                where=str(attempt.path),
                fix="raise clusters[0].nodes and start the run again to have more",
                id="start.refused",
            )
        node = free[0] if wanted is None else wanted
        record = {"node": node, **ProcessId.of(os.getpid()).record()}
        write_record(attempt.node_record(node), record)
        return node


def start_node(run_dir: RunDir, attempt: Attempt, node: int | None) -> subprocess.Popen[bytes]:
    """Start the agent of one node on this machine, in a session of its own."""
    command = [sys.executable, "-m", "isles.agent", str(run_dir.path.absolute())]
    command += ["--attempt", str(attempt.number)]
    command += ["--node", str(node)] if node is not None else []
    log = attempt.node_log(node) if node is not None else attempt.agent_log
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

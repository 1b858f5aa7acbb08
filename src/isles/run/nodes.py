"""The resolved nodes of an attempt: attempts/N/fleet.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from isles import __version__
from isles.errors import UserError
from isles.run.owner import OwnRecord
from isles.run.paths import Attempt
from isles.run.records import MAX_LIST_BYTES, as_kind, read_record, write_record

Host = Annotated[str, Field(pattern=r"^([^\s-]\S*)?$")]
"""An ssh destination, never an option."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """One node.

    Args:
        node: its number. The ranks are in the order of the nodes.
        name: the host's name, for messages.
        ssh: its destination for ssh from the machine that started the run, or None.
        address: its address for the other nodes.
        interface: the network interface with the address, or None if unknown.
    """

    node: int
    name: str
    ssh: Host | None
    address: Host
    nproc: int
    interface: str | None = None

    @property
    def label(self) -> str:
        known = self.name if self.address in (self.name, "") else f"{self.name}, {self.address}"
        return f"node {self.node} ({known})"


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes of an attempt. Every node has the same file before its processes start.

    Args:
        launcher: launcher of the run file. For local, the nodes are processes of one machine.
        nodes: in the order of their numbers. An agent on another host than planned
            reports its host when it connects.
        port: port of the coordinator, or 0 if unknown or if no coordinator listens.
        min_nodes: the run continues while at least this many nodes are connected.
        start_timeout_s: longest wait of the first node for the others.
        digest: SHA-256 of resolved.yaml, which must be the same on all nodes.
        resume_from: a checkpoint that the user gave.
        coordinator: address of the coordinator. If empty, the first node's address.
        sees_run_dir: whether isles knows that all nodes see the coordinator's run directory.
        container: the container that the agents enter, a record of `isles.launch.container`.
        is_own: whether this user has written the record.
    """

    launcher: str
    nodes: tuple[FleetNode, ...]
    port: int
    min_nodes: int
    device: str
    start_timeout_s: float
    digest: str
    resume_from: str | None = None
    coordinator: str = ""
    sees_run_dir: bool = False
    container: dict[str, Any] | None = None
    is_own: bool = field(default=False, compare=False)

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, number: int) -> FleetNode:
        return self.nodes[number]

    def __iter__(self) -> Iterator[FleetNode]:
        return iter(self.nodes)

    @property
    def first(self) -> FleetNode:
        return self.nodes[0]

    @property
    def in_job(self) -> bool:
        """True if the agents are processes of a queue's job, which may be requeued."""
        return self.launcher in ("kubernetes", "slurm", "pbs")

    @property
    def has_own_node(self) -> bool:
        """True if the agent of the first node is also the coordinator."""
        if self.launcher == "local":
            return len(self.nodes) == 1
        return not self.in_job and not self.are_replaced

    @property
    def are_replaced(self) -> bool:
        """True if the launcher replaces the agent of a lost node."""
        return self.launcher == "ray"

    @property
    def meets_at(self) -> str:
        """The address of the coordinator for the agents."""
        return self.coordinator or self.first.address

    @property
    def is_shared(self) -> bool:
        """True if isles knows that all nodes see the coordinator's run directory."""
        return self.in_job or self.launcher == "local" or self.sees_run_dir

    @property
    def is_elastic(self) -> bool:
        """True if the run continues without some of its nodes."""
        return self.min_nodes < len(self.nodes)

    @property
    def world_size(self) -> int:
        return sum(node.nproc for node in self.nodes)

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "is_own"}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Fleet:
        """Read `record`, and ignore unknown keys. ValidationError: a key is missing."""
        return as_kind(cls, record)

    def write(self, attempt: Attempt, path: Path | None = None) -> None:
        """Write the record, to fleet.json or elsewhere."""
        write_record(path or attempt.fleet, {"isles": __version__, **self.record()})


def read_fleet(attempt: Attempt, path: Path | None = None) -> Fleet | None:
    """The recorded nodes of an attempt, in fleet.json or another file, or None without a record.

    Raises:
        UserError: another version of isles has written it, and this version cannot read it.
    """
    record = read_record(path or attempt.fleet, MAX_LIST_BYTES)
    if record is None:
        return None
    try:
        return replace(Fleet.of(record), is_own=isinstance(record, OwnRecord))
    except ValidationError as error:
        theirs = f"isles {record.get('isles', 'of another version')}"
        key = (error.errors()[0]["loc"] or ("keys",))[-1]
        raise UserError(
            f"the record of the run's nodes was written by {theirs}, and isles {__version__} "
            f"does not support its {key!r}",
            where=str(attempt.fleet),
            fix=f"use {theirs} for this run, or start the run again with `isles train`",
        ) from error


def read_own_fleet(attempt: Attempt) -> Fleet | None:
    """Read the nodes to connect to them, or to enter their container. None if the record is missing
    or another user has started the attempt."""
    fleet = None if attempt.owner else read_fleet(attempt)
    return fleet if fleet is not None and fleet.is_own else None


def require_nodes(attempt: Attempt, path: Path | None = None) -> Fleet:
    """Like `read_fleet`, but raise a UserError if the record is missing."""
    if (nodes := read_fleet(attempt, path)) is not None:
        return nodes
    raise UserError(
        "this attempt of the run has no record of its nodes",
        where=str(path or attempt.fleet),
        fix="start the run with `isles train` and its run file",
        id="start.refused",
    )

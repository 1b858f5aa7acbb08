"""The nodes of a start of a run, as its launcher has settled them: attempts/N/fleet.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from isles import __version__
from isles.errors import UserError
from isles.run.paths import Attempt
from isles.run.records import read_record, write_record


@dataclass(frozen=True, slots=True)
class FleetNode:
    """One node's place.

    Args:
        node: its number; the ranks are in the order of the nodes.
        name: for messages: the host's name.
        ssh: how ssh reaches it from where the run was started; None: not by ssh.
        address: where the other nodes reach it.
        nproc: its ranks.
        interface: the network interface that has the address; None: unknown.
    """

    node: int
    name: str
    ssh: str | None
    address: str
    nproc: int
    interface: str | None = None

    @property
    def label(self) -> str:
        """As messages call it."""
        known = self.name if self.address in (self.name, "") else f"{self.name}, {self.address}"
        return f"node {self.node} ({known})"


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes of one start; the same file on every node, written before anything runs there.

    Args:
        launcher: ssh or manual; local where the nodes are processes of one machine.
        nodes: in the order of their numbers; the first leads, and keeps the run directory.
        port: where the first node's supervisor listens, for the others to meet.
        min_nodes: the run goes on while so many are there.
        device: cpu or cuda.
        start_timeout_s: longest wait of the first node for the others.
        digest: SHA-256 of resolved.yaml, which must be the same on all nodes.
        resume_from: a checkpoint that was asked for by name.
    """

    launcher: str
    nodes: tuple[FleetNode, ...]
    port: int
    min_nodes: int
    device: str
    start_timeout_s: float
    digest: str
    resume_from: str | None = None

    @property
    def head(self) -> FleetNode:
        """The node that leads."""
        return self.nodes[0]

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on without some of its nodes."""
        return self.min_nodes < len(self.nodes)

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return sum(node.nproc for node in self.nodes)

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Fleet:
        """From `record`; keys that another version of isles has added are left out.

        Raises:
            ValueError: something is missing.
        """
        try:
            nodes = tuple(FleetNode(**_known(FleetNode, node)) for node in record["nodes"])
            return cls(**{**_known(cls, record), "nodes": nodes})
        except (KeyError, TypeError) as error:
            raise ValueError(str(error)) from error

    def write(self, attempt: Attempt) -> None:
        """Leave it for the nodes."""
        write_record(attempt.fleet, {"isles": __version__, **self.record()})


def _known(kind: type[Fleet] | type[FleetNode], record: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in record.items() if name in names}


def read_fleet(attempt: Attempt) -> Fleet | None:
    """The nodes of an attempt; None where its launcher has none to settle.

    Raises:
        UserError: a version of isles has written it that says other things of a fleet.
    """
    record = read_record(attempt.fleet)
    if record is None:
        return None
    try:
        return Fleet.of(record)
    except ValueError as error:
        theirs = record.get("isles") or "another version"
        raise UserError(
            f"the record of the run's nodes was written by isles {theirs}, and isles {__version__} "
            f"does not understand it: {error}",
            where=str(attempt.fleet),
            fix=f"use isles {theirs} for this run, or start it again: `isles train`"
            if "isles" in record
            else "use the isles that started this run, or start it again: `isles train`",
        ) from error

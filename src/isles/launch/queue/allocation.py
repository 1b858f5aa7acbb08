"""The nodes that a scheduler has given to a job, as the job's own script sees them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from isles.errors import CommunicationError


@dataclass(frozen=True, slots=True)
class JobNode:
    """A node of a job.

    Args:
        name: of the host, as the scheduler writes it.
        address: at which the other nodes reach it; 127.0.0.1 in a job of one node.
    """

    name: str
    address: str


class Allocation(Protocol):
    """What a queue gives to the coordinator, which runs in the job's script."""

    @property
    def job(self) -> str:
        """For messages, such as `Slurm job 4711`."""
        ...

    @property
    def key(self) -> str:
        """A word that no other start of any job has."""
        ...

    @property
    def nodes(self) -> list[JobNode]:
        """The nodes, in the order of their numbers; the first one is this host."""
        ...

    @property
    def first_port(self) -> int:
        """Added to network.port, so that two jobs that share a node begin at different ones."""
        ...

    def on_all_nodes(self, words: list[str], log: Path) -> list[list[str]]:
        """Command lines that run `python -m isles.agent RUN_DIR --attempt N WORDS` on each node.

        Args:
            words: the agent's further arguments.
            log: a path in which `%n` stands for the number of the node.
        """
        ...

    def save_at(self) -> float | None:
        """When to save before the time limit, by time.monotonic(); None: a signal says so."""
        ...

    def is_preempted(self) -> bool:
        """Whether another job takes the nodes, and this one is not queued again by itself."""
        ...

    def queue_again(self) -> str:
        """Queue this job again, to go on; what was done, in words.

        Raises:
            UserError: it could not be.
        """
        ...


def address_of(names: list[str], host: str) -> str:
    """An IPv4 address at which other hosts reach a host: never one of its own loopback.

    Args:
        names: of the host, or addresses, the best first.
        host: its name, for the error.

    Raises:
        CommunicationError: none of the names has one.
    """
    for name in names:
        try:
            found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue
        for entry in found:
            address = str(entry[4][0])
            if not address.startswith("127."):
                return address
    raise CommunicationError(
        f"no address is known for the node {host}",
        where=f"host {socket.gethostname()}",
        fix=f"getent ahostsv4 {host} should say it; set clusters[0].network.interface otherwise",
        id="net.names",
    )

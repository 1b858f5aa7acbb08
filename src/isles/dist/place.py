"""Where ranks are: the node of each, and what befalls some nodes only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from isles.dist.world import World
from isles.errors import ConfigErrors, UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, for messages and for finding the ranks that share its disk.

    Args:
        rank: which one.
        leader: rank of the node's first process, which names the node.
        host: the machine's name.
    """

    rank: int
    leader: int
    host: str

    @property
    def is_leader(self) -> bool:
        """Whether this rank acts for its node."""
        return self.rank == self.leader

    def __str__(self) -> str:
        return f"{self.host} (rank {self.leader})"


def place_of(world: World) -> Place:
    """This rank's place."""
    return Place(world.rank, world.rank - world.local_rank, world.host)


def on_every_rank(world: World, work: Callable[[], T]) -> T:
    """Run `work` on every rank; what fails on one is raised on all. All ranks must call this.

    Returns:
        This rank's own result.

    Raises:
        UserError: of the first rank that failed; where not all did, with the nodes that did.
    """
    value: T | None = None
    fault: UserError | None = None
    try:
        value = work()
    except UserError as error:
        fault = error
    found = world.gather((place_of(world), fault))
    failed = [(place, error) for place, error in found if error is not None]
    if not failed:
        return value  # type: ignore[return-value]  # no error: `work` has returned
    first = failed[0][1]
    if len(failed) < len(found) and not isinstance(first, ConfigErrors):
        nodes = ", ".join(dict.fromkeys(str(place) for place, _ in failed))
        first.where = f"{first.where} on {nodes}" if first.where else nodes
    raise first

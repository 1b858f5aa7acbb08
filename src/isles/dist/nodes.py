"""Nodes of a world: where each rank is, and work that some ranks do while the others wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from isles.dist.world import World
from isles.errors import CommunicationError, ConfigErrors, UserError

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_LOOK_S, _LOOK_S = 0.02, 0.5


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


def raise_first(faults: list[UserError | None]) -> None:
    """Raise the first fault that there is; called with the same faults on every rank."""
    for fault in faults:
        if fault is not None:
            raise fault


def work_together(
    work: Callable[[Callable[[str], None]], T] | None,
    world: World,
    *,
    progress: Callable[[str], None],
    no_progress_s: float,
) -> list[T | None]:
    """Run `work` on the ranks that have some; all wait for it. All ranks must call this.

    The ranks hear of one another every half second, so that the wait is bounded by what the work
    reports and not by the time-out of one collective operation.

    Args:
        work: called in a thread, with a function that takes a line about how far it is; None: this
            rank has nothing to do.
        world: the ranks.
        progress: called on every rank with what the others report.
        no_progress_s: longest time in which none of those that work may report anything new.

    Returns:
        Every rank's result, by rank; None where it had no work.

    Raises:
        Exception: the error of the first rank that failed, on every rank.
        CommunicationError: those that work have reported nothing new for too long.
    """
    reported = ""
    result: Future[T | None] = Future()

    def report(line: str) -> None:
        nonlocal reported
        reported = line

    def run() -> None:
        assert work is not None
        try:
            result.set_result(work(report))
        except UserError as error:
            result.set_exception(error)
        except Exception as error:
            # Not every exception can be sent; this rank's own log has its traceback.
            log.exception("failed while the other nodes waited")
            result.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    if work is None:
        result.set_result(None)
    else:
        # A daemon: where another node fails, this process ends without waiting for it.
        threading.Thread(target=run, daemon=True).start()
    known: dict[int, str] = {}
    last_news, wait_s = time.monotonic(), _FIRST_LOOK_S
    while True:
        is_done = result.done()
        error = result.exception() if is_done else None
        value = result.result() if is_done and error is None else None
        states = world.gather((is_done, reported, value, error))
        for _, _, _, failure in states:
            if failure is not None:
                raise failure
        for rank, (_, line, _, _) in enumerate(states):
            if line != known.get(rank, ""):
                known[rank], last_news = line, time.monotonic()
                progress(line)
        running = [rank for rank, state in enumerate(states) if not state[0]]
        if not running:
            return [state[2] for state in states]
        # One may wait in silence for another that prepares the same on a disk that they share.
        if time.monotonic() - last_news > no_progress_s:
            who = ", ".join(f"{rank} ({known.get(rank, 'nothing')!r})" for rank in running)
            raise CommunicationError(
                f"ranks that prepare data have said nothing new for {no_progress_s:.0f} s; the "
                f"last of each was: {who}",
                where=f"rank {min(running)}",
                fix="look at the logs of these ranks",
                id="data.waiting",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LOOK_S)

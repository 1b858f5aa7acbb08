"""Nodes as the data sees them: what each has, and work that some do while the others wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from isles.dist.world import World
from isles.errors import CommunicationError, UserError

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_BEAT_S, _BEAT_S = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class _Beat(Generic[T]):
    state: Literal["idle", "running", "done", "failed"]
    message: str = ""
    value: T | None = None
    error: Exception | None = None


class _Worker(Generic[T]):
    """Work in a thread of its own; what it says and becomes is read by beats."""

    def __init__(self, work: Callable[[Callable[[str], None]], T] | None) -> None:
        self._message = ""
        self._beat: _Beat[T] = _Beat("idle")
        if work is not None:
            self._beat = _Beat("running")
            # A daemon: where another node fails, this process ends without waiting for it.
            threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def beat(self) -> _Beat[T]:
        """How it stands."""
        if self._beat.state == "running":
            return _Beat("running", self._message)
        return self._beat

    def _say(self, text: str) -> None:
        self._message = text

    def _run(self, work: Callable[[Callable[[str], None]], T]) -> None:
        try:
            self._beat = _Beat("done", self._message, work(self._say))
        except UserError as error:
            self._beat = _Beat("failed", error=error)
        except Exception as error:
            # Not every exception can be sent; this rank's own log has its traceback.
            log.exception("failed while the other nodes waited")
            self._beat = _Beat("failed", error=RuntimeError(f"{type(error).__name__}: {error}"))


def work_together(
    work: Callable[[Callable[[str], None]], T] | None,
    world: World,
    *,
    progress: Callable[[str], None],
    no_progress_s: float,
) -> list[T | None]:
    """Run `work` on the ranks that have some; all wait for it, however long it takes.

    The ranks hear of one another every half second, so that the wait is bounded by what the work
    says of itself and not by the time-out of one collective operation. All ranks must call this.

    Args:
        work: called in a thread, with a function to which it says how far it is; None: this rank
            has nothing to do.
        world: the ranks.
        progress: called on every rank with what the others say.
        no_progress_s: longest time in which none of those that work may say anything new.

    Returns:
        Every rank's result, by rank; None where it had no work.

    Raises:
        Exception: the error of the first rank that failed, on every rank.
        CommunicationError: those that work have said nothing new for too long.
    """
    worker = _Worker(work)
    said: dict[int, str] = {}
    last_news, wait_s = time.monotonic(), _FIRST_BEAT_S
    while True:
        beats = world.gather(worker.beat())
        for beat in beats:
            if beat.error is not None:
                raise beat.error
        running = {rank: beat.message for rank, beat in enumerate(beats) if beat.state == "running"}
        if not running:
            return [beat.value for beat in beats]
        for rank, message in running.items():
            if said.get(rank) != message:
                said[rank], last_news = message, time.monotonic()
                progress(message or f"rank {rank} begins to prepare")
        # One may wait in silence for another that prepares the same on a disk that they share.
        if time.monotonic() - last_news > no_progress_s:
            who = ", ".join(f"{rank} ({said[rank] or 'nothing'!r})" for rank in running)
            raise CommunicationError(
                f"ranks that prepare data have said nothing new for {no_progress_s:.0f} s; the "
                f"last of each was: {who}",
                where=f"rank {min(running)}",
                fix="look at the logs of these ranks",
                id="data.waiting",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _BEAT_S)

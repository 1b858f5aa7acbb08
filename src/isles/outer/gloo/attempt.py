"""One attempt of an epoch, in a thread that nothing waits for longer than it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from isles.outer.gloo.group import Group


@dataclass(frozen=True, slots=True)
class Made:
    """An average in a file."""

    digest: str
    size_bytes: int


class Attempt:
    """Averages in a thread of its own, until it is done, has failed, or is abandoned.

    Args:
        work: makes a group, tells `hold` of it, and averages.
    """

    def __init__(self, work: Callable[[Attempt], Made]) -> None:
        self.group: Group | None = None
        self._is_abandoned = False
        self._lock = threading.Lock()
        loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Made] = loop.create_future()

        def run() -> None:
            try:
                made = work(self)
            # A thread's edge: gloo raises RuntimeError, a store whatever its client raises.
            except Exception as error:
                loop.call_soon_threadsafe(self._settle, None, error)
            else:
                loop.call_soon_threadsafe(self._settle, made, None)

        self._thread = threading.Thread(target=run, name="gloo", daemon=True)
        self._thread.start()

    def _settle(self, made: Made | None, error: Exception | None) -> None:
        if self.result.done():
            return
        if made is not None:
            self.result.set_result(made)
        elif error is not None:
            self.result.set_exception(error)

    def hold(self, group: Group) -> Group:
        """From here on `abandon` has this group left."""
        with self._lock:
            self.group = group
            if self._is_abandoned:
                group.leave()
        return group

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs still."""
        return self._thread.is_alive()

    async def abandon(self, deadline_s: float) -> bool:
        """Have it end as soon as it can; whether its thread has done so within the time."""
        with self._lock:
            self._is_abandoned = True
            if self.group is not None:
                self.group.leave()
        self.result.add_done_callback(_retrieve)
        end = asyncio.get_running_loop().time() + deadline_s
        while self.is_alive and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        return not self.is_alive


def _retrieve(result: asyncio.Future[Made]) -> None:
    if not result.cancelled():
        result.exception()

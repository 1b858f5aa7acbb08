"""What the hub does beside answering: averages, files that come, who is silent; in threads."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from isles.outer.hub.core import Core
from isles.outer.hub.files import Averager, Incoming, Job, average, norm_of, part_bytes
from isles.outer.hub.journal import JOURNAL, damaged
from isles.outer.hub.rules import Settings
from isles.outer.messages import Join

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_TICK_S, _RETRY_S, _LOOK_S = 0.1, 2.0, 1.0
_ALONE_S = 3600.0
"""A cluster that was stopped, or waits in a queue once more, may still come back."""
_STILL_S = 1.0
"""This process itself stood still (SIGSTOP, a machine that slept): it could hear nobody."""
_MEASURE_S = 20.0


def load_averager() -> Averager:
    """The codecs of isles; imports torch."""
    from isles.outer import average as codecs

    return codecs


class Work:
    """The core, and the threads and tasks that work for it.

    Args:
        folder: state directory; what lies there is gone on with.
        settings: the rules of the run.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.core = Core(folder, settings, time.monotonic)
        self.run = ""
        """The run's name."""
        self.run_file = folder / "run.yaml"
        """What clusters elsewhere are given, where it is there."""
        self._averager: Averager | None = None
        self._loading = asyncio.Lock()
        # One thread has the journal; the numbers and the files have theirs.
        self._journal_thread = ThreadPoolExecutor(1, "journal")
        self._number_threads = ThreadPoolExecutor(2, "numbers")
        self._file_threads = ThreadPoolExecutor(4, "files")
        self.changed = asyncio.Event()
        """Set, and then another, when something has changed that somebody may wait for."""
        self._incoming: dict[Path, Incoming] = {}
        self._opening = asyncio.Lock()
        self._measuring: dict[tuple[Path, str], asyncio.Task[tuple[float, str]]] = {}

    def begin(self) -> None:
        self.ticking = asyncio.create_task(self._tick())
        self._warming = asyncio.create_task(self.averager())  # takes seconds; soon it is needed

    async def stop(self) -> None:
        """End the tasks and threads, and close the files."""
        self.ticking.cancel()
        await asyncio.gather(self.ticking, self._warming, return_exceptions=True)
        for threads in (self._number_threads, self._file_threads, self._journal_thread):
            threads.shutdown(wait=True)
        for incoming in self._incoming.values():
            incoming.close()
        self.core.journal.close()

    async def finished(self, grace_s: float, *, alone_s: float = _ALONE_S) -> None:
        """Return when all clusters have finished and left, and none has joined for a while.

        Args:
            grace_s: the while.
            alone_s: so long it waits for a cluster that is not heard, or was stopped, once others
                have finished and nobody is left.
        """
        over_since = alone_since = None
        while True:
            now, changed = time.monotonic(), self.changed
            is_over = await self.look(self.core.is_over)
            is_alone = await self.look(self.core.is_left_alone)
            over_since = (over_since or now) if is_over else None
            alone_since = (alone_since or now) if is_alone else None
            if over_since is not None and now - over_since >= grace_s:
                return
            if alone_since is not None and now - alone_since >= alone_s:
                log.warning("nobody is heard, and some clusters have not finished: this ends here")
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(grace_s, alone_s, _LOOK_S))

    # Threads.

    async def ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of `core` in the journal's thread, and wake up whoever waits for news."""
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._journal_thread, partial(call, *args, **kwargs))
        self._wake()
        return result

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def look(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `ask`, for methods that change nothing."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._journal_thread, partial(call, *args, **kwargs))

    async def in_file_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._file_threads, partial(call, *args, **kwargs))

    async def _count(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._number_threads, partial(call, *args, **kwargs))

    # Numbers.

    async def averager(self) -> Averager:
        async with self._loading:
            if self._averager is None:
                self._averager = await self._count(load_averager)
            return self._averager

    async def measure(self, outer_step: int, path: Path, digest: str) -> tuple[float, str] | None:
        """The norm of a contribution, or why it must not be averaged; None: not known yet.

        However often it is asked for, the file is read once.
        """
        key = (path, digest)
        if key not in self._measuring:
            self._measuring[key] = asyncio.create_task(self._measure(outer_step, path))
        task = self._measuring[key]
        done, _ = await asyncio.wait({task}, timeout=_MEASURE_S)
        if not done:
            return None
        self._measuring.pop(key, None)
        return task.result()

    async def _measure(self, outer_step: int, path: Path) -> tuple[float, str]:
        averager = await self.averager()
        pieces = self.core.pieces[outer_step % len(self.core.pieces)]
        try:
            return await self._count(norm_of, averager, self.core.codec, pieces, path), ""
        except FileNotFoundError:
            return 0.0, ""  # the outer step was decided meanwhile: `Core.complete` knows
        except ValueError as error:
            return 0.0, str(error)

    async def sizes(self, join: Join) -> list[int]:
        """Of each fragment the bytes of a contribution, if this cluster is the first.

        Raises:
            UserError: there is no such codec.
        """
        if self.core.sizes:
            return self.core.sizes
        averager = await self.averager()
        return [
            await self._count(part_bytes, averager, join.codec, pieces) for pieces in join.pieces
        ]

    # Files that come.

    async def incoming(self, path: Path, size_bytes: int) -> Incoming:
        """A file that comes in chunks; what had come before a restart is there."""
        async with self._opening:
            if path not in self._incoming:
                self._incoming[path] = await self.in_file_thread(Incoming, path, size_bytes)
            return self._incoming[path]

    async def forget(self, path: Path, *, discard: bool = False) -> None:
        incoming = self._incoming.pop(path, None)
        if incoming is not None:
            await self.in_file_thread(incoming.discard if discard else incoming.close)

    # Outer steps.

    async def _tick(self) -> None:
        averaging: asyncio.Task[None] | None = None
        while True:
            started, pause_s = time.monotonic(), _TICK_S
            try:
                if await self.look(self.core.drop_silent):
                    self._wake()
                if averaging is None or averaging.done():
                    job = await self.look(self.core.close_round)
                    averaging = None if job is None else asyncio.create_task(self._try_average(job))
            except (OSError, sqlite3.OperationalError) as error:  # a full disk, say
                pause_s = _RETRY_S
                log.error("%s: %s; tried again in %g s", self.folder, error, pause_s)
            except sqlite3.DatabaseError as error:
                raise damaged(self.folder / JOURNAL, str(error)) from error
            await asyncio.sleep(pause_s)
            if (still_s := time.monotonic() - started - pause_s) > _STILL_S:
                await self.look(self.core.membership.forgive, still_s)

    async def _try_average(self, job: Job) -> None:
        try:
            await self._average(job)
        except (OSError, sqlite3.OperationalError) as error:  # a full disk, say
            log.error("round %d cannot be averaged now: %s; tried again", job.outer_step, error)
            await asyncio.sleep(_RETRY_S)
        except Exception as error:
            log.exception("round %d cannot be averaged now", job.outer_step)
            why = (
                f"round {job.outer_step} cannot be averaged: {error}; tried again in {_RETRY_S:g} s"
            )
            await self.ask(self.core.journal.note, "", "failure", why)
            await asyncio.sleep(_RETRY_S)

    async def _average(self, job: Job) -> None:
        start = time.monotonic()
        pieces = self.core.pieces[job.fragment]
        averager = await self.averager()
        result = await self._count(average, averager, self.core.codec, pieces, job)
        averaged = time.monotonic()
        for path, _ in job.parts:
            await self.forget(path)
        await self.ask(self.core.commit, job.outer_step, result)
        for path in [path for path in self._incoming if not path.exists()]:
            await self.forget(path)
        log.info(
            "round=%d committed fragment=%d clusters=%d bytes=%d average_s=%.2f commit_s=%.2f",
            job.outer_step,
            job.fragment,
            len(job.parts),
            result.size_bytes,
            averaged - start,
            time.monotonic() - averaged,
        )

"""Background work of the hub, in threads: averages, uploads, silent members."""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from isles.outer.hub.core import HubCore
from isles.outer.hub.files import Incoming, average, coming, measure, norm_of, part_bytes
from isles.outer.hub.journal import JOURNAL, damaged
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.messages import Contribution, ContributionAnswer, Join
from isles.outer.state_file import momentum_of, state_digest

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_TICK_S, _RETRY_S, _LOOK_S = 0.25, 2.0, 0.5
_ALONE_S = 3600.0
"""Seconds to wait for a cluster that was stopped, or is queued again, and may still come back."""
_LONGEST_TICK_S = 1.0
_MEASURE_S = 20.0

TURN = ContextVar[asyncio.Lock | None]("TURN", default=None)
"""Lock of the sender whose request is served; see `Traffic.turn`. None: the hub's own work."""


class AwakeClock:
    """Seconds in which this process ran. SIGSTOP, or suspend of the machine, makes no member
    silent."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, longest_tick_s: float = _LONGEST_TICK_S
    ) -> None:
        self._clock, self._longest_tick_s = clock, longest_tick_s
        self._last = 0.0, clock()

    def now(self) -> float:
        before, ticked_at = self._last
        return before + min(self._clock() - ticked_at, self._longest_tick_s)

    def tick(self) -> None:
        """Call this more often than the longest tick lasts."""
        self._last = self.now(), self._clock()


class HubWork:
    """The core, and its threads and tasks.

    Args:
        folder: state directory; an existing state is continued.
        settings: settings of the run.
        threads: pieces to compute at the same time. torch may use more threads for each.
    """

    def __init__(self, folder: Path, settings: Settings, *, threads: int = 1) -> None:
        self.folder, self._threads = folder, threads
        self._clock = AwakeClock()
        self.core = HubCore(folder, settings, self._clock.now)
        self.run = ""
        """The run's name."""
        self.run_file = folder / "run.yaml"
        """Run file for clusters that join, if there is one."""
        # One thread is for the journal, two for numbers, so that uploads continue in the meantime.
        self._journal_thread = ThreadPoolExecutor(1, "journal")
        self._number_threads = ThreadPoolExecutor(2, "numbers")
        self.changed = asyncio.Event()
        """Set, and then replaced, at each change that somebody may wait for."""
        self._num_changes = 0
        self._sizes: list[int] = []
        self._incoming: dict[Path, Incoming] = {}
        self._opening = asyncio.Lock()
        self._completing: dict[tuple[str, int, str], asyncio.Task[None]] = {}

    def begin(self) -> None:
        self._importing = asyncio.create_task(self._count(part_bytes, "none", [1]))  # takes seconds
        self.ticking = asyncio.gather(self._again(self._look_after), self._again(self._average))

    async def stop(self) -> None:
        """Stop the tasks and threads."""
        self.ticking.cancel()
        tasks: list[asyncio.Future[Any]] = [self.ticking, self._importing]
        await asyncio.gather(*tasks, *self._completing.values(), return_exceptions=True)
        for threads in (self._number_threads, self._journal_thread):
            threads.shutdown(wait=True)
        self.core.journal.close()

    async def finished(self, grace_s: float, *, alone_s: float = _ALONE_S) -> None:
        """Return when all clusters have finished and left, and none has joined for a while.

        Args:
            grace_s: seconds without a join.
            alone_s: seconds to wait for a silent or stopped cluster if others have finished and
                none is
                connected.
        """
        before, since = "", 0.0
        waits_s = {"over": grace_s, "alone": alone_s}
        while True:
            kind = await self.ask(self.core.membership.end_kind)
            if kind != before:
                before, since = kind, time.monotonic()
            if kind and time.monotonic() - since >= waits_s[kind]:
                break
            await asyncio.sleep(min(grace_s, alone_s, _LOOK_S))
        if kind == "alone":
            log.warning("no cluster is connected and some have not finished; shutting down")

    # Threads.

    async def ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of `core` in the journal's thread, as one transaction, in its `TURN`."""
        whole = partial(self.core.journal.do, call, *args, **kwargs)
        loop = asyncio.get_running_loop()
        try:
            async with TURN.get() or nullcontext():
                return await loop.run_in_executor(self._journal_thread, whole)
        finally:
            if self.core.journal.num_changes != self._num_changes:
                self._num_changes = self.core.journal.num_changes
                self.wake()

    def wake(self) -> None:
        """Wake all tasks that wait for news."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def _count(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        whole = partial(call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._number_threads, whole)

    # Contributions and other uploads.

    async def check_codec(self, join: Join) -> None:
        """Check that contributions can be read, before a run starts with them.

        Raises:
            UserError: the codec is unknown.
        """
        if await self._first() is None:
            await self._count(part_bytes, join.codec, [1])

    async def _first(self) -> Join | None:
        return await self.ask(lambda: self.core.rounds.first)

    async def incoming(self, path: Path, size_bytes: int) -> Incoming:
        """A file that arrives in chunks; chunks from before a restart are kept."""
        async with self._opening:
            found = self._incoming.get(path)
            if found is None or found.size_bytes != size_bytes:
                if found is not None:  # of a former file with this path
                    await asyncio.to_thread(found.close)
                found = await asyncio.to_thread(Incoming, path, size_bytes)
                self._incoming[path] = found
            return found

    async def forget(self, *paths: Path) -> None:
        """Close files that are kept or no longer needed, so that no sender can change them."""
        async with self._opening:
            for path in paths:
                if path in self._incoming:  # before another one is opened with its path
                    await asyncio.to_thread(self._incoming[path].close)
                    del self._incoming[path]

    async def part(self, member_id: str, outer_step: int) -> Incoming:
        """The file of a contribution that may be sent; see `HubCore.part_path`."""
        path = await self.ask(self.core.part_path, member_id, outer_step)
        first = await self._first()
        assert first is not None
        if not self._sizes:
            self._sizes = [
                await self._count(part_bytes, first.codec, pieces) for pieces in first.pieces
            ]
        return await self.incoming(path, self._sizes[outer_step % len(first.pieces)])

    async def complete(self, outer_step: int, contribution: Contribution) -> ContributionAnswer:
        """Measure and count a contribution. Repeated requests read its file only once.

        Raises:
            Refusal: chunks are missing, it is refused, or it is too late.
        """
        key = (contribution.id, outer_step, contribution.digest)
        if key not in self._completing:
            complete = self._complete(outer_step, contribution)
            self._completing[key] = asyncio.create_task(complete)
        task = self._completing[key]
        done, _ = await asyncio.wait({task}, timeout=_MEASURE_S)
        if done:
            self._completing.pop(key, None)
            task.result()
        return ContributionAnswer(is_measured=bool(done))

    async def _complete(self, outer_step: int, contribution: Contribution) -> None:
        if await self.ask(self.core.is_counted, contribution.id, outer_step):
            return
        incoming = await self.part(contribution.id, outer_step)
        await asyncio.to_thread(incoming.seal, contribution.digest)
        first = await self._first()
        assert first is not None
        norm, failure = 0.0, ""
        try:
            pieces = first.pieces[outer_step % len(first.pieces)]
            path, threads = incoming.path, self._threads
            norm = await self._count(norm_of, first.codec, pieces, path, threads=threads)
        except ValueError as error:
            failure = str(error)

        def count() -> None:
            # Keep exactly the measured file, or count nothing: a refusal undoes nothing.
            if self.core.is_counted(contribution.id, outer_step):
                return
            if not failure and math.isfinite(norm):
                incoming.keep()
            self.core.complete(outer_step, contribution, norm, failure)

        try:
            await self.ask(count)
        except Refusal as error:
            if error.kind == "refused":
                incoming.path.unlink(missing_ok=True)
            raise
        finally:
            await self.forget(incoming.goal)

    # Tasks.

    async def _again(self, step: Callable[[], Awaitable[object]]) -> None:
        # At each change, and periodically, because a time limit may be over.
        while True:
            changed = self.changed
            try:
                await step()
            except (OSError, sqlite3.OperationalError) as error:  # a full disk, say
                log.error("%s: %s (trying again in %g s)", self.folder, error, _RETRY_S)
                await asyncio.sleep(_RETRY_S)
                continue
            except sqlite3.DatabaseError as error:
                raise damaged(self.folder / JOURNAL, str(error)) from error
            # Not wait_for, which may swallow a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await changed.wait()

    async def is_sound(self, state: int, files: Sequence[Path]) -> bool:
        """True if the files of a state match its announcement; see `States.is_sound`."""
        first, content = await self._first(), await self.ask(self.core.states.content, state)
        assert first is not None
        layout, version = first.identity.get("layout", ""), content.version
        has_momentum = momentum_of(first.identity)
        found = [
            await self._count(state_digest, path, layout, index, version, pieces, has_momentum)
            for index, (path, pieces) in enumerate(zip(files, first.pieces, strict=False))
        ]
        return found == content.outer_params

    async def sweep(self) -> None:
        """Remove files that no cluster needs."""
        await self.ask(self.core.sweep)
        await self.forget(*[path for path in self._incoming if not coming(path).exists()])

    async def _look_after(self) -> None:
        self._clock.tick()
        await self.ask(self.core.membership.drop_silent)
        if self.core.membership.has_left:
            self.core.membership.has_left = False
            await self.sweep()

    async def _average(self) -> None:
        # Average the next round, if it is time.
        job, first = await self.ask(self.core.rounds.close), await self._first()
        if first is None or job is None:
            return
        started = time.monotonic()
        pieces = first.pieces[job.outer_step % len(first.pieces)]
        try:
            digest, size_bytes = await self._count(
                average, first.codec, pieces, job, threads=self._threads
            )
        except (ValueError, RuntimeError, MemoryError, EOFError, FileNotFoundError) as error:
            found = await self._count(measure, first.codec, pieces, job)
            if await self.ask(self.core.measured, job.outer_step, found):
                self.wake()
                return
            log.exception("cannot average round %d now", job.outer_step)
            why = f"cannot average round {job.outer_step}: {error}"
            await self.ask(self.core.journal.note, "", "failure", why)
            await asyncio.sleep(_RETRY_S)
            return
        averaged = time.monotonic()
        await self.ask(self.core.commit, job.outer_step, digest, size_bytes)
        await self.sweep()
        log.info(
            "round=%d committed clusters=%d bytes=%d average_s=%.2f commit_s=%.2f",
            job.outer_step,
            len(job.parts),
            size_bytes,
            averaged - started,
            time.monotonic() - averaged,
        )

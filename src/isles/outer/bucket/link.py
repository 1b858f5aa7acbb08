"""Requests to a bucket with retries, and files in pieces, each a separate object."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from isles.errors import ConfigError
from isles.facts.buckets import FIXES
from isles.outer.client.http import DeadlineError, HubRefusal, RateLimit, in_parallel
from isles.outer.messages import digest_of, hash_chunks
from isles.run.objects import Store, StoreError

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

PIECE_BYTES = 2 * 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_THREADS, _TRANSFERS, _AT_ONCE = 4, 4, 2
"""Sizes of two thread pools: large transfers must not delay a heartbeat. Together with the chain's
thread they use fewer than the ten connections of the bucket's driver."""
_FOREVER_S = 1e9


class BucketRefusal(HubRefusal):
    """The bucket, or its content, prevents this cluster from taking part."""

    id = "bucket.refused"


class Missing(Exception):
    """An object is missing in the bucket, or has other bytes than announced."""


class BucketLink:
    """One cluster's connection to a bucket; for one event loop.

    Args:
        report: called with the reason of retries, once for each reason.
    """

    def __init__(
        self, store: Store, up: RateLimit, down: RateLimit, report: Callable[[str], None]
    ) -> None:
        self.store, self.up, self.down = store, up, down
        self._report, self._reported = report, ""
        self.threads = ThreadPoolExecutor(_THREADS, "bucket")
        self._transfers = ThreadPoolExecutor(_TRANSFERS, "transfer")
        self._sent: set[str] = set()

    def close(self) -> None:
        for threads in (self.threads, self._transfers):
            threads.shutdown(wait=False, cancel_futures=True)

    async def call(
        self,
        what: str,
        deadline_s: float,
        function: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a function that uses the store, in a thread."""
        return await self.within(self.threads, what, deadline_s, lambda: function(*args, **kwargs))

    async def within(
        self, threads: Executor, what: str, deadline_s: float, function: Callable[[], R]
    ) -> R:
        """Call a function that uses the store, in these threads, until it works.

        Raises:
            DeadlineError: it has not worked by the deadline.
            BucketRefusal: another try would not help.
        """
        loop = asyncio.get_running_loop()
        end, pause_s = loop.time() + deadline_s, _FIRST_PAUSE_S
        kind, last = "away", "no answer"
        while True:
            try:
                async with asyncio.timeout_at(end):
                    found = await loop.run_in_executor(threads, function)
                    self._reported = ""
                    return found
            except TimeoutError:
                pass
            except StoreError as error:
                kind, last = error.kind, error.what
                if kind in ("forbidden", "missing", "unconditional", "odd"):
                    raise refusal(error, self.store.url) from error
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            delay_s = pause_s * random.uniform(0.5, 1.0)
            if loop.time() + delay_s >= end:
                raise DeadlineError(
                    f"{what} failed for {deadline_s:.0f} s; the last error was {last}",
                    where=self.store.url,
                    fix=FIXES[kind],
                    id="bucket.away",
                )
            if last != self._reported:
                self._reported = last
                self._report(f"{what} failed, trying again: {last}")
            await asyncio.sleep(delay_s)

    # Files.

    async def put(self, place: str, path: Path) -> None:
        """Write a file, or its missing pieces; the content of a place never changes."""
        size_bytes = path.stat().st_size
        handle = os.open(path, os.O_RDONLY)

        async def send(index: int) -> None:
            name, start = _piece(place, index), index * PIECE_BYTES
            if name in self._sent:
                return
            data = await asyncio.to_thread(os.pread, handle, PIECE_BYTES, start)
            await asyncio.sleep(self.up.delay(len(data)))
            write = partial(self.store.write, name, data)
            await self.within(self._transfers, f"writing {name}", _FOREVER_S, write)
            self.up.total += len(data)
            self._sent.add(name)

        try:
            await in_parallel(send, range(_pieces(size_bytes)), _AT_ONCE)
        finally:
            os.close(handle)

    async def get(self, place: str, size_bytes: int, digest: str, target: Path) -> None:
        """Fetch a file. The target exists only when it is complete.

        Args:
            digest: digest of its chunks' hashes, from `hash_chunks`.

        Raises:
            Missing: it does not exist, or differs from its announcement.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f"{target.name}.partial")
        handle = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)

        async def receive(index: int) -> None:
            name, start = _piece(place, index), index * PIECE_BYTES
            size = min(PIECE_BYTES, size_bytes - start)
            await asyncio.sleep(self.down.delay(size))
            read = partial(self.store.read, name)
            data = await self.within(self._transfers, f"reading {name}", _FOREVER_S, read)
            if data is None or len(data) != size:
                found = "is missing" if data is None else f"has {len(data)} bytes, not {size}"
                raise Missing(f"{name} {found}")
            self.down.total += size
            await asyncio.to_thread(os.pwrite, handle, data, start)

        try:
            os.ftruncate(handle, size_bytes)
            await in_parallel(receive, range(_pieces(size_bytes)), _AT_ONCE)
            await asyncio.to_thread(os.fsync, handle)
        finally:
            os.close(handle)
        if not await asyncio.to_thread(is_whole, beside, digest):
            raise Missing(f"{place} differs from its announcement")
        beside.replace(target)

    def forget(self, places: Iterable[str]) -> None:
        """Allow deletion of everything sent to these places."""
        gone = tuple(places)
        self._sent = {name for name in self._sent if not name.startswith(gone)}


def refusal(error: StoreError, url: str) -> BucketRefusal:
    """The error for the user, for a failure that does not pass by itself."""
    words = {"forbidden": "access is forbidden: ", "missing": "the bucket does not exist: "}
    what = f"{words.get(error.kind, '')}{error.what}"
    return BucketRefusal(error.kind, what, where=url, fix=FIXES[error.kind])


def is_whole(path: Path, digest: str) -> bool:
    return path.exists() and digest_of(hash_chunks(path)) == digest


def copy(source: Path, target: Path) -> None:
    """Copy a file; the target appears only when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.partial")
    shutil.copyfile(source, beside)
    beside.replace(target)


def as_refusal(error: ConfigError) -> BucketRefusal:
    """The error for a bucket without a journal that this version can read."""
    return BucketRefusal("malformed", error.what, where=error.where, fix=error.fix)


def _pieces(size_bytes: int) -> int:
    return -(-size_bytes // PIECE_BYTES)


def _piece(place: str, index: int) -> str:
    return f"{place}-{index:05d}"

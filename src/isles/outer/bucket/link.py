"""Requests to a bucket that are tried again, and files in pieces, each an object of its own."""

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
"""Two pools: what many bytes wait for must not hold up a heartbeat. With the chain's thread they
are fewer than the ten connections of the bucket's driver."""
_FOREVER_S = 1e9


class BucketRefusal(HubRefusal):
    """The bucket, or what lies in it, lets this cluster do nothing as things are."""

    id = "bucket.refused"


class Missing(Exception):
    """What should lie in the bucket does not, or other bytes do."""


class Link:
    """One cluster's way to a bucket; for one event loop.

    Args:
        report: told why something is tried again, once for each reason.
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
            BucketRefusal: trying again would not help.
        """
        loop = asyncio.get_running_loop()
        end, pause_s = loop.time() + deadline_s, _FIRST_PAUSE_S
        kind, last = "away", "it does not answer"
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
                    f"{what} has not worked for {deadline_s:.0f} s; at last: {last}",
                    where=self.store.url,
                    fix=FIXES[kind],
                    id="bucket.away",
                )
            if last != self._reported:
                self._reported = last
                self._report(f"{what} is tried again: {last}")
            await asyncio.sleep(delay_s)

    # Files.

    async def put(self, place: str, path: Path) -> None:
        """Write a file, or what is not there of it; its bytes belong to the place for ever."""
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
        """Fetch a file. The target is there only when it is whole.

        Args:
            digest: of its chunks' hashes, as `hash_chunks` finds them.

        Raises:
            Missing: it is not there, or not what was announced.
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
                found = "is not there" if data is None else f"has {len(data)} bytes, not {size}"
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
            raise Missing(f"{place} is not what was announced")
        beside.replace(target)

    def forget(self, places: Iterable[str]) -> None:
        """What was sent to these places may be deleted."""
        gone = tuple(places)
        self._sent = {name for name in self._sent if not name.startswith(gone)}


def refusal(error: StoreError, url: str) -> BucketRefusal:
    """What a user is told of an error that does not pass by itself."""
    words = {"forbidden": "it is forbidden: ", "missing": "there is no such bucket: "}
    what = f"{words.get(error.kind, '')}{error.what}"
    return BucketRefusal(error.kind, what, where=url, fix=FIXES[error.kind])


def is_whole(path: Path, digest: str) -> bool:
    return path.exists() and digest_of(hash_chunks(path)) == digest


def copy(source: Path, target: Path) -> None:
    """Copy a file, which is then there as a whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.partial")
    shutil.copyfile(source, beside)
    beside.replace(target)


def as_refusal(error: ConfigError) -> BucketRefusal:
    """What lies in the bucket is no journal that this version can read."""
    return BucketRefusal("malformed", error.what, where=error.where, fix=error.fix)


def _pieces(size_bytes: int) -> int:
    return -(-size_bytes // PIECE_BYTES)


def _piece(place: str, index: int) -> str:
    return f"{place}-{index:05d}"

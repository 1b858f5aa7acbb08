"""Hub duties of a cluster that meets others in a bucket: watch members, close rounds, average.

Every cluster does them with its own copy of the memory (`chain.py`). The first one writes the
result; the same result from other clusters changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from isles.config.foreign import parse_json
from isles.errors import CommunicationError, ConfigError
from isles.outer.bucket.chain import Chain
from isles.outer.bucket.link import BucketLink, BucketRefusal, Missing, copy, is_whole
from isles.outer.hub.core import HubCore, differences, status
from isles.outer.hub.files import AveragingJob, average, measure, part_bytes
from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.hub.work import AwakeClock
from isles.outer.messages import Heartbeat, Join
from isles.run.manifest import number_of
from isles.run.objects import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S, _STRUCK_S = 1.0, 3.0
_LONGEST_LOOK_S = 3 * _POLL_S
"""Maximum time counted between two looks: members are not silent while this process does
not look."""
_AROUND = 5
_TURN_S = 30.0
"""Seconds after which the next cluster also computes an average that has not arrived."""
_LONGEST = 80
_LOOK_S, _AVERAGE_S = 60.0, 600.0
BEAT_BYTES = 4096
"""Limit of a heartbeat in bytes. The longest values of `Heartbeat` take less than 700."""
_SHOWN = ("round", "fragments", "members", "open", "heavy")


class Replica:
    """One cluster's copy of the hub's memory, and its hub duties.

    Args:
        settings: settings of the run.
        folder: folder for contributions and averages in transfer.
        name: name of this cluster.
        own: returns the file of this cluster's own contribution to an outer step, if it exists.
        show: called with what all clusters show to people.
    """

    def __init__(
        self,
        link: BucketLink,
        settings: Mapping[str, Any],
        folder: Path,
        name: str,
        own: Callable[[int], Path],
        show: Callable[[dict[str, Any]], None],
    ) -> None:
        self._clock = AwakeClock(longest_tick_s=_LONGEST_LOOK_S)
        folder.mkdir(parents=True, exist_ok=True)
        rules, memory = Settings.model_validate(settings), Journal(Path(":memory:"))
        self.core = HubCore(folder, rules, self._clock.now, memory)
        self.chain = Chain(link.store, self.core)
        self.changed = asyncio.Event()
        """Set, and then replaced, at each change that somebody may wait for."""
        self.number = 0
        """Id of this cluster as a member."""
        self.joined: Join | None = None
        """This cluster's join request. Sizes of files are derived from it, not from the journal,
        which others write."""
        self._link, self._name, self._own, self._show = link, name, own, show
        self._thread = ThreadPoolExecutor(1, "chain")
        self._poke = asyncio.Event()
        self._looks = 0
        self._beats: dict[int, bytes] = {}  # hashes
        self._averaging: asyncio.Task[None] | None = None
        self._closed: tuple[int, float] = -1, 0.0

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # The memory.

    async def ask(self, call: Callable[[], T]) -> T:
        """Read from the local copy of the memory.

        Raises:
            ConfigError: the journal contains a value that isles does not write.
        """
        loop = asyncio.get_running_loop()
        checked = partial(self._of_this_run, call)
        return await loop.run_in_executor(self._thread, partial(self.chain.read, checked))

    def _of_this_run(self, call: Callable[[], T]) -> T:
        first, joined = self.core.rounds.first, self.joined
        if first is not None and joined is not None:
            found = [
                f"{key} is {there[:_LONGEST]!a} there, but {here[:_LONGEST]!a} in this cluster"
                for key, (there, here) in differences(first, joined).items()
            ]
            if first.pieces != joined.pieces:
                found.append("the weights are divided into different pieces")
            if found:
                raise ConfigError(
                    "the journal belongs to another run than the one that this cluster has "
                    f"joined: {found[0]}",
                    where=self._link.store.url,
                    fix="check who can write to the bucket; if that is as intended, use an empty "
                    "prefix",
                    id="bucket.refused",
                )
        return call()

    async def open(self, deadline_s: float) -> None:
        await self._link.within(self._thread, "reading the journal", deadline_s, self.chain.open)

    async def change(self, what: str, call: Callable[[], T], deadline_s: float) -> T:
        """Change the memory, for all clusters.

        Args:
            what: description of the change.
            call: method of the core; it may be called more than once.

        Raises:
            Refusal: the core refuses.
        """
        before = self.chain.number
        try:
            checked = partial(self._of_this_run, call)
            return await self._link.within(
                self._thread, what, deadline_s, lambda: self.chain.change(self._name, checked)
            )
        finally:
            if self.chain.number != before:
                self.wake()

    def wake(self) -> None:
        """Wake all tasks that wait for news."""
        self.changed.set()
        self.changed = asyncio.Event()
        self._poke.set()

    # Looking.

    async def look(self) -> None:
        """Watch the other clusters, and do the hub duties, in a loop."""
        while True:
            pause_s, before = _POLL_S, self.chain.number
            self._poke.clear()
            try:
                job = await self._look()
                if self.chain.number != before:
                    self.wake()
                if job is not None and await self.ask(partial(self._is_my_turn, job)):
                    self._averaging = asyncio.create_task(self._average(job))
                found = await self.ask(lambda: status(self.core))
                self._show({**{key: found[key] for key in _SHOWN}, "at": time.time()})
            except (StoreError, TimeoutError) as error:
                log.info("outer cannot read the bucket: %s", error)
                pause_s = _STRUCK_S
            # Not `wait_for`: Python 3.11's forgets that it was canceled if both happen at the same
            # time.
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._poke.wait()

    async def _look(self) -> AveragingJob | None:
        self._looks += 1
        looks_around = self._looks % _AROUND == 0

        def look() -> list[tuple[int, str]]:
            self.chain.follow(looks_around=looks_around)
            members = [*self.core.membership.living(), *self.core.membership.away()]
            found = [(row["number"], row["name"]) for row in members if row["name"] != self._name]
            return found[: self.core.settings.max_clusters]

        async with asyncio.timeout(_LOOK_S):
            others = await self.ask(look)
            loop, threads = asyncio.get_running_loop(), self._link.threads
            beats = await asyncio.gather(
                *(loop.run_in_executor(threads, self._read_beat, name) for _, name in others)
            )
            self._clock.tick()

            def tend() -> AveragingJob | None:
                heard = self._beats
                self._beats = {number: heard[number] for number, _ in others if number in heard}
                for (number, _), beat in zip(others, beats, strict=True):
                    if beat is None:
                        continue
                    if heard.get(number) != (digest := hashlib.sha256(beat).digest()):
                        self._beats[number] = digest
                        self._hear(number, beat)
                return self.chain.change(self._name, partial(self._of_this_run, self._tend))

            return await self.ask(tend)

    def _read_beat(self, name: str) -> bytes | None:
        try:
            return self._link.store.read(f"members/{name}", BEAT_BYTES)
        except StoreError as error:
            if error.kind != "odd":
                raise
            return b""  # counts as an unreadable heartbeat; the other members are still seen

    def _hear(self, number: int, beat: bytes) -> None:
        core = self.core
        try:
            said = parse_json(beat)
            heartbeat, asks = Heartbeat.model_validate(said["heartbeat"]), said["asks"]
        except (ValidationError, ValueError, KeyError, TypeError, RecursionError):
            log.info("outer cannot read the heartbeat of member %d", number)
            return
        before = core.membership.heartbeats.get(number)
        core.membership.touch(number)
        core.membership.note_heartbeat(number, heartbeat)
        if before is not None and heartbeat.sent_bytes > before.sent_bytes:
            core.states.note_progress(number)
        if asks:
            core.states.touch()
        if asks == self._name:
            core.states.ask(self.number)

    def _tend(self) -> AveragingJob | None:
        self.core.membership.drop_silent()
        return self.close_round()

    def close_round(self) -> AveragingJob | None:
        """The next round to average, if it is closed or can be closed now; part of a change."""
        journal, job = self.core.journal, self.core.rounds.close()
        if job is not None and (journal.get("averager") or "").split(" ")[0] != f"{job.outer_step}":
            journal.put("averager", f"{job.outer_step} {self.number}")
        return job

    # Averaging.

    def _is_my_turn(self, job: AveragingJob) -> bool:
        # The cluster that closed a round averages it; if it dies or is slow, the next one does.
        outer_step = job.outer_step
        if self._averaging is not None:
            return False
        if self._closed[0] != outer_step:
            self._closed = outer_step, self._clock.now()
        first = int((self.core.journal.get("averager") or "0 0").split(" ")[1])
        living = [row["number"] for row in self.core.membership.living()]
        order = sorted(living, key=lambda number: (number < first, number))
        if self.number not in order:
            return False
        waited_s = self._clock.now() - self._closed[1]
        return waited_s >= order.index(self.number) * _TURN_S

    async def _average(self, job: AveragingJob) -> None:
        try:
            await self._make_average(job)
        except Refusal as error:
            log.info("outer round %d: %s", job.outer_step, error.what)
        except (OSError, CommunicationError, ConfigError) as error:
            log.warning("outer round %d is not averaged yet: %s", job.outer_step, error)
            await asyncio.sleep(_STRUCK_S)
        except (ValueError, RuntimeError, MemoryError):
            log.exception("outer cannot average round %d now", job.outer_step)
            await asyncio.sleep(_STRUCK_S)
        finally:
            self._averaging = None
            self._poke.set()

    async def _make_average(self, job: AveragingJob) -> None:
        step, core, link = job.outer_step, self.core, self._link
        sql = "SELECT * FROM objects WHERE round = ?"
        rows = await self.ask(lambda: core.journal.rows(sql, step))
        assert self.joined is not None, "not joined"
        codec, pieces = self.joined.codec, self.joined.pieces[step % len(self.joined.pieces)]
        due = await asyncio.to_thread(part_bytes, codec, pieces)
        wanted = [path for path, _ in job.parts]
        for row in rows:
            number, digest = row["member"], row["digest"]
            path = core.rounds.part_path(step, number)
            if path not in wanted:
                continue
            try:
                if row["size"] != due:
                    raise Missing(f"it is announced with {row['size']} bytes, not {due}")
                if number == self.number and await asyncio.to_thread(
                    is_whole, self._own(step), digest
                ):
                    await asyncio.to_thread(copy, self._own(step), path)
                elif not await asyncio.to_thread(is_whole, path, digest):
                    await link.get(part_place(step, number, digest), row["size"], digest, path)
            except Missing as error:
                why = f"its contribution is not in the bucket: {error}"
                await self._leave_out(step, number, why)
                return
        # Each cluster has measured its own contribution, so the norm must be verified.
        found = await asyncio.to_thread(measure, codec, pieces, job)
        measured = partial(core.measured, step, found)
        if await self.change(f"measuring round {step}", measured, _AVERAGE_S):
            return
        digest, size_bytes = await asyncio.to_thread(average, codec, pieces, job)
        if size_bytes:
            await link.put(average_place(step, digest), job.target)

        def commit() -> None:
            if core.rounds.next == step and core.rounds.state(step) == "averaging":
                core.commit(step, digest, size_bytes)
                core.sweep()

        await self.change(f"committing round {step}", commit, _AVERAGE_S)
        log.info("outer round=%d committed clusters=%d bytes=%d", step, len(job.parts), size_bytes)
        await self._sweep()

    async def _leave_out(self, step: int, number: int, why: str) -> None:
        def leave_out() -> None:
            if self.core.rounds.state(step) == "averaging":
                self.core.rounds.leave_out(step, number, why)

        await self.change(f"leaving a contribution out of round {step}", leave_out, _AVERAGE_S)

    async def _sweep(self) -> None:
        # Delete objects that are no longer needed. Finished work is never needed again, so an old
        # view of the memory does no harm.
        core, store = self.core, self._link.store
        following, kept_since = await self.ask(lambda: (core.rounds.next, core.rounds.kept_since))
        sql = "SELECT seq FROM sqlite_sequence WHERE name = 'states'"
        known = await self.ask(lambda: core.journal.rows("SELECT number FROM states"))
        given = await self.ask(lambda: core.journal.row(sql))
        states, last = {row["number"] for row in known}, given["seq"] if given else 0

        def sweep() -> None:
            gone = [
                name
                for name in store.names("rounds/")
                if (number := _number(name)) < kept_since
                or (number < following and "/average-" not in name)
            ]
            gone += [
                name
                for name in store.names("states/")
                if _number(name) <= last and _number(name) not in states
            ]
            store.delete(gone)
            self._link.forget(gone)
            self.chain.sweep()

        with suppress(CommunicationError):
            await self._link.call("deleting old objects", _LOOK_S, sweep)


def part_place(outer_step: int, number: int, digest: str) -> str:
    """Name of a contribution in the bucket."""
    return f"rounds/{outer_step:08d}/part-{number}-{digest[:16]}"


def average_place(outer_step: int, digest: str) -> str:
    """Name of an average in the bucket."""
    return f"rounds/{outer_step:08d}/average-{digest[:16]}"


def state_place(state: int, index: int, digest: str) -> str:
    """Name of a file of a state in the bucket."""
    return f"states/{state:08d}/{index}-{digest[:16]}"


def _number(name: str) -> int:
    number = number_of(name.split("/")[1])
    return 2**62 if number is None else number


def refused(error: Refusal, url: str) -> BucketRefusal:
    """The core's refusal, in the form of a client error."""
    return BucketRefusal(error.kind, error.what, where=url, fix=error.fix)

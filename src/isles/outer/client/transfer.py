"""The folder in which a cluster's contributions, averages and states lie on their way."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from isles.errors import CommunicationError
from isles.outer.client.api import Client
from isles.outer.client.events import Committed, Event, Interval, Note, Sent, StateReady
from isles.outer.client.http import RendezvousRefusal
from isles.outer.messages import TurnAnswer, digest_of, hash_chunks
from isles.run.records import read_record, write_record

log = logging.getLogger(__name__)


_KEPT_BYTES = 16
"""For averages that a checkpoint lacks, by number: what a checkpoint with AdamW takes, too."""


class Spool:
    """The folder in which contributions, averages and states lie on their way.

    Args:
        folder: of this cluster's own.
        kept: so many averages stay for others after they have been applied.
        since: turns that this cluster had applied at a checkpoint with which it may go on. The
            averages of all turns since stay, too, so that it needs nobody then.
        most_bytes: for those. What is older is given up.
    """

    def __init__(self, folder: Path, kept: int, since: int, most_bytes: int) -> None:
        self.folder, self.since = folder, since
        self._kept, self._most_bytes = kept, most_bytes

    @classmethod
    def of(cls, folder: Path, pieces: Sequence[Sequence[int]], since: int, kept: int) -> Spool:
        """With room for as much as a checkpoint takes."""
        folder.mkdir(mode=0o700, exist_ok=True)
        return cls(folder, kept, since, _KEPT_BYTES * sum(map(sum, pieces)))

    def contribution(self, turn: int) -> Path:
        """Of this cluster, to a turn."""
        return self.folder / f"contribution-{turn:08d}"

    def average(self, turn: int) -> Path:
        """Of a turn that is committed: there only when it is whole."""
        return self.folder / f"average-{turn:08d}"

    def _answer(self, turn: int) -> Path:
        return self.folder / f"average-{turn:08d}.json"

    @property
    def pulled(self) -> Path:
        """Where a state comes in."""
        return self.folder / "pulled"

    @property
    def given(self) -> Path:
        """Where rank 0 writes a state for another cluster."""
        return self.folder / "given"

    def has(self, version: int) -> int:
        """Turns that this cluster has applied, or can apply with the averages that lie here."""
        while self.average(version).exists():
            version += 1
        return version

    def note_answer(self, answer: TurnAnswer) -> None:
        """Keep what the hub said of a turn, beside its average: another hub may need it."""
        write_record(self._answer(answer.turn), {"answer": answer.model_dump(), "outer_params": ""})

    def note_outer_params(self, turn: int, digest: str) -> None:
        """Keep which outer parameters the average of a turn has led to."""
        if (record := read_record(self._answer(turn))) is not None:
            write_record(self._answer(turn), {**record, "outer_params": digest}, durable=False)

    def kept_turns(self, version: int) -> list[tuple[TurnAnswer, str, Path]]:
        """The last turns, without a gap: what the hub said, which outer parameters, the average."""
        found: list[tuple[TurnAnswer, str, Path]] = []
        for turn in range(self.has(version) - 1, -1, -1):
            record = read_record(self._answer(turn))
            if record is None or not self.average(turn).exists():
                break
            answer = TurnAnswer.model_validate(record["answer"])
            found.append((answer, str(record["outer_params"]), self.average(turn)))
        return found[::-1]

    def tidy(self, version: int) -> None:
        """Remove what nobody needs once so many turns have been applied."""
        spare: list[tuple[int, Path]] = []
        for path in self.folder.iterdir():
            kind, _, rest = path.name.partition("-")
            number = rest[:8]
            if not number.isdecimal():
                continue
            turn = int(number)
            if kind == "average" and turn < version - self._kept:
                spare.append((turn, path))
            elif kind == "contribution" and turn < version:
                path.unlink(missing_ok=True)
        if not spare:
            return
        with suppress(FileNotFoundError):
            spare_bytes = sum(path.stat().st_size for _, path in spare)
            free_bytes = shutil.disk_usage(self.folder).free
            # They help in rare cases: checkpoints come first.
            left = min(self._most_bytes, (free_bytes + spare_bytes) // 2)
            for turn, path in sorted(spare, reverse=True):
                left -= path.stat().st_size
                if turn < self.since or left < 0:
                    path.unlink(missing_ok=True)


R = TypeVar("R")

_AHEAD = 4
"""So many averages lie here at most that have not been applied."""
_WAIT_S, _SEND_S, _FETCH_S, _SETTLE_S = 60.0, 3600.0, 3600.0, 20.0
_AGAIN_S, _SOON_S = 1.0, 0.5
_SAID = {"late", "refused", "behind"}


async def patiently(call: Callable[[], Awaitable[R]]) -> R:
    """Do something for as long as it takes.

    Raises:
        RendezvousRefusal: the hub says no.
    """
    while True:
        try:
            return await call()
        except RendezvousRefusal:
            raise
        except CommunicationError as error:
            log.info("%s", error.what)
            await asyncio.sleep(_SOON_S)


class Turns:
    """Follows the turns from the first one that this cluster has not heard of.

    Args:
        name: of this cluster.
        spool: where files lie.
        version: turns that have been applied.
        emit: tells rank 0.
        is_averaged: is told the samples of a contribution that is in an average.
    """

    def __init__(
        self,
        name: str,
        spool: Spool,
        version: int,
        emit: Callable[[Event], None],
        is_averaged: Callable[[Sequence[Interval]], None],
    ) -> None:
        self._name, self._spool, self._emit = name, spool, emit
        self._is_averaged = is_averaged
        self.version = self._delivered = version
        self.parts: dict[int, Sent] = {}
        """Contributions that are decided in no turn yet."""
        self._tasks: dict[int, asyncio.Task[tuple[int, float]]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._room = asyncio.Event()

    def begin(
        self,
        group: asyncio.TaskGroup,
        control: Client,
        data: Client,
        check: Callable[[RendezvousRefusal], None],
        *,
        is_movable: bool,
    ) -> None:
        """There is a hub to be asked, which has not let this cluster in yet.

        Args:
            group: where tasks run.
            control: for what is said.
            data: for what is fetched.
            check: raises what follows from a refusal.
            is_movable: the hub may be lost with its memory, as it is one of the clusters': no
                average is applied that some living cluster lacks.
        """
        self._tasks.clear()
        self._follower = None
        self._group, self._control, self._data = group, control, data
        self._check, self._is_movable = check, is_movable
        self._sending = asyncio.Lock()

    def start(self) -> None:
        """Follow the turns."""
        self.stop()
        self._spool.tidy(self.version)
        self._follower = self._group.create_task(self._follow())
        for turn in sorted(self.parts):
            self._send(turn)

    def stop(self) -> None:
        """Follow no turn, as long as the outer parameters are not the run's."""
        for task in (self._follower, *self._tasks.values()):
            if task is not None:
                task.cancel()
        self._tasks.clear()
        self._follower = None

    @property
    def pending_samples(self) -> list[Interval]:
        """Samples of contributions that are not decided."""
        return [span for part in self.parts.values() for span in part.samples]

    def forget(self, version: int) -> None:
        """Another cluster's outer parameters were taken over: contributions of others are void."""
        self.version = self._delivered = version
        for turn in self.parts:
            self._spool.contribution(turn).unlink(missing_ok=True)
        self.parts.clear()

    def contribute(self, part: Sent) -> None:
        """A contribution lies in the spool."""
        self.parts[part.turn] = part
        if self._follower is not None:
            self._send(part.turn)

    def applied(self, turn: int) -> None:
        """An average has been applied."""
        self.version = turn + 1
        for late in [other for other in self.parts if other <= turn]:
            # It came after the turn was decided; `tidy` removes the file.
            del self.parts[late]
            if (task := self._tasks.pop(late, None)) is not None:
                task.cancel()
        self._spool.tidy(self.version)
        self._room.set()

    def _send(self, turn: int) -> None:
        self._tasks[turn] = self._group.create_task(self._bring_in(self.parts[turn]))

    async def _bring_in(self, part: Sent) -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        channel, path = self._data.channel, self._spool.contribution(part.turn)
        while True:
            try:
                # One after the other: the turn that is committed first gets the whole line.
                async with self._sending:
                    started, sent = loop.time(), channel.sent_bytes
                    await patiently(
                        lambda: self._data.contribute(
                            part.turn,
                            path,
                            tokens=part.tokens,
                            steps=part.inner_steps,
                            samples=part.samples,
                            deadline_s=_SEND_S,
                        )
                    )
                    return channel.sent_bytes - sent, loop.time() - started
            except RendezvousRefusal as error:
                if error.kind in _SAID:
                    self._emit(Note(text=error.what, is_warning=error.kind != "late"))
                    return 0, 0.0
                if error.kind != "early":
                    self._check(error)
                await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        turn = self._delivered
        while True:
            while turn >= self.version + _AHEAD:
                self._room.clear()
                await self._room.wait()
            answer = await self._committed(turn)
            sent_bytes, send_s = await self._settle(answer)
            before, started = self._data.channel.received_bytes, loop.time()
            path = self._spool.average(turn)
            await self._bring(answer, path)
            receive_s = loop.time() - started
            if self._is_movable:
                self._spool.note_answer(answer)
                await self._wait_until_all_have(turn)
            self._delivered = turn + 1
            part = self.parts.pop(turn, None)
            # Without a part an earlier attempt made it, or it was of outer parameters since
            # replaced.
            is_in = part is not None and self._name in answer.weights
            if part is not None and is_in:
                self._is_averaged(part.samples)
            self._emit(
                Committed(
                    turn=turn,
                    path=path if answer.size_bytes else None,
                    is_in=is_in,
                    weights=answer.weights,
                    refused=answer.refused,
                    size_bytes=answer.size_bytes,
                    sent_bytes=sent_bytes,
                    received_bytes=self._data.channel.received_bytes - before,
                    send_s=send_s,
                    receive_s=receive_s,
                )
            )
            if part is not None:
                self._spool.contribution(turn).unlink(missing_ok=True)
            turn += 1

    async def _committed(self, turn: int) -> TurnAnswer:
        while True:
            try:
                return await self._control.wait_turn(turn, _WAIT_S)
            except RendezvousRefusal as error:
                log.warning("%s", error.what)
                await asyncio.sleep(_AGAIN_S)
            except CommunicationError as error:
                log.info("%s", error.what)
                if turn in self.parts and "it waits for" in error.what:
                    self._emit(Note(text=error.what, is_warning=True))

    async def _settle(self, answer: TurnAnswer) -> tuple[int, float]:
        task = self._tasks.pop(answer.turn, None)
        if task is None:
            return 0, 0.0
        if self._name in answer.weights:
            await asyncio.wait({task}, timeout=_SETTLE_S)  # it is about to find out
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            return 0, 0.0
        return task.result()

    async def _bring(self, answer: TurnAnswer, path: Path) -> None:
        if not answer.size_bytes:
            path.touch()  # nothing is missing: see `Spool.has`
            return
        while True:
            if path.exists():
                if digest_of(await asyncio.to_thread(hash_chunks, path)) == answer.digest:
                    return
                path.unlink()
            try:
                await patiently(lambda: self._data.fetch_average(answer, path, _FETCH_S))
            except RendezvousRefusal as error:
                if error.kind == "unknown":
                    self._check(error)
                # It is not kept any more: with the next heartbeat comes the order to pull.
                log.info("%s", error.what)
                await asyncio.sleep(_AGAIN_S)

    async def _wait_until_all_have(self, turn: int) -> None:
        while True:
            try:
                if await patiently(lambda: self._control.held(turn, _WAIT_S)):
                    return
            except RendezvousRefusal as error:
                self._check(error)
                await asyncio.sleep(_AGAIN_S)


async def pull_state(
    data: Client,
    spool: Spool,
    check: Callable[[RendezvousRefusal], None],
    emit: Callable[[Event], None],
) -> None:
    """Fetch another cluster's state, for as long as it takes, and tell rank 0 of it.

    Args:
        data: for what is fetched.
        spool: where it comes in.
        check: raises what follows from a refusal.
        emit: tells rank 0.
    """
    while True:
        try:
            answer = await data.pull_state(spool.pulled, _WAIT_S)
            break
        except CommunicationError as error:
            if isinstance(error, RendezvousRefusal) and error.kind in ("unknown", "over"):
                check(error)
            emit(Note(text=error.what, is_warning=True))
            await asyncio.sleep(_AGAIN_S)
    emit(
        StateReady(
            version=answer.version,
            paths=tuple(spool.pulled / file.name for file in answer.files),
            outer_params=tuple(answer.outer_params),
            donor=answer.donor,
        )
    )

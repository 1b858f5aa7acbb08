"""Contributions go out, averages come in, in order; states, both ways; the folder they lie in."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from isles.errors import CommunicationError
from isles.outer.client.api import HubApi
from isles.outer.client.http import HubRefusal
from isles.outer.messages import Adopt, Apply, Command, Pending, RoundAnswer, digest_of, hash_chunks
from isles.outer.samples import Interval
from isles.run.records import read_record, write_record

log = logging.getLogger(__name__)

R = TypeVar("R")

_AHEAD = 4
"""So many averages lie here at most that have not been applied."""
_WAIT_S, _SEND_S, _FETCH_S, _CANCEL_S = 60.0, 3600.0, 3600.0, 20.0
_AGAIN_S, _SOON_S, _WHOLE_S = 1.0, 0.5, 24 * 3600.0
_FINAL = {"late", "refused", "behind"}
_KEPT_BYTES = 16
"""For averages that a checkpoint lacks, by number: what a checkpoint with AdamW takes, too."""


class Report(Protocol):
    """Tells the log, or with `warns` the user, how it stands; see `Session.report`."""

    def __call__(self, text: str, *, warns: bool = False) -> None: ...


class Spool:
    """The folder in which contributions, averages and states lie on their way.

    Args:
        kept: so many averages stay for others after they have been applied.
        since: outer steps that this cluster had applied at a checkpoint with which it may go on.
            The averages of all later ones stay, too, so that it needs nobody then.
        most_bytes: for those. What is older is given up.
    """

    def __init__(self, folder: Path, kept: int, since: int, most_bytes: int) -> None:
        self.folder, self.since = folder, since
        self._kept, self._most_bytes = kept, most_bytes
        self.pulled, self.given = folder / "pulled", folder / "given"

    @classmethod
    def of(cls, folder: Path, pieces: Sequence[Sequence[int]], since: int, kept: int) -> Spool:
        """With room for as much as a checkpoint takes."""
        folder.mkdir(mode=0o700, exist_ok=True)
        return cls(folder, kept, since, _KEPT_BYTES * sum(map(sum, pieces)))

    def contribution(self, outer_step: int) -> Path:
        return self.folder / f"contribution-{outer_step:08d}"

    def average(self, outer_step: int) -> Path:
        """The file is there only when it is whole."""
        return self.folder / f"average-{outer_step:08d}"

    def _answer(self, outer_step: int) -> Path:
        return self.folder / f"average-{outer_step:08d}.json"

    def has(self, version: int) -> int:
        """Outer steps that are applied, or can be with the averages that lie here."""
        while self.average(version).exists():
            version += 1
        return version

    def note_answer(self, answer: RoundAnswer) -> None:
        """Keep the hub's answer beside the average: another hub may need it."""
        record = {"answer": answer.model_dump(), "outer_params": ""}
        write_record(self._answer(answer.outer_step), record)

    def note_outer_params(self, outer_step: int, digest: str) -> None:
        """Keep which outer parameters an average has led to."""
        path = self._answer(outer_step)
        if (record := read_record(path)) is not None:
            write_record(path, {**record, "outer_params": digest}, durable=False)

    def kept_rounds(self, version: int) -> list[tuple[RoundAnswer, str, Path]]:
        """The last ones, without a gap: the hub's answer, the outer parameters, the average."""
        found: list[tuple[RoundAnswer, str, Path]] = []
        for outer_step in range(self.has(version) - 1, -1, -1):
            record, average = read_record(self._answer(outer_step)), self.average(outer_step)
            if record is None or not average.exists():
                break
            answer = RoundAnswer.model_validate(record["answer"])
            found.append((answer, str(record["outer_params"]), average))
        return found[::-1]

    def tidy(self, version: int) -> None:
        """Remove what nobody needs once so many outer steps have been applied."""
        spare: list[tuple[int, Path]] = []
        for path in self.folder.iterdir():
            kind, _, rest = path.name.partition("-")
            number = rest[:8]
            if not number.isdecimal():
                continue
            if kind == "average" and int(number) < version - self._kept:
                spare.append((int(number), path))
            elif kind == "contribution" and int(number) < version:
                path.unlink(missing_ok=True)
        if not spare:
            return
        with suppress(FileNotFoundError):
            spare_bytes = sum(path.stat().st_size for _, path in spare)
            free_bytes = shutil.disk_usage(self.folder).free
            # They help in rare cases: checkpoints come first.
            left = min(self._most_bytes, (free_bytes + spare_bytes) // 2)
            for outer_step, path in sorted(spare, reverse=True):
                left -= path.stat().st_size
                if outer_step < self.since or left < 0:
                    path.unlink(missing_ok=True)


async def until_answered(call: Callable[[], Awaitable[R]]) -> R:
    """Ask until the hub answers.

    Raises:
        HubRefusal: the hub says no.
    """
    while True:
        try:
            return await call()
        except HubRefusal:
            raise
        except CommunicationError as error:
            log.info("%s", error.what)
            await asyncio.sleep(_SOON_S)


class Transfers:
    """Uploads contributions, and fetches one average after the other, as far as rank 0 keeps up.

    Args:
        version: outer steps that have been applied.
        emit: takes commands for the ranks.
        report: takes lines for the log.
        is_averaged: takes the samples of a contribution that is in an average.
    """

    def __init__(
        self,
        name: str,
        spool: Spool,
        version: int,
        emit: Callable[[Command], None],
        report: Report,
        is_averaged: Callable[[Sequence[Interval]], None],
    ) -> None:
        self._name, self._spool, self._emit = name, spool, emit
        self._report, self._is_averaged = report, is_averaged
        self.version = self._delivered = version
        self.pending: dict[int, Pending] = {}
        self._uploads: dict[int, asyncio.Task[tuple[int, float]]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._giving: asyncio.Task[None] | None = None
        self.asked_at = -math.inf
        """When rank 0 was asked for a state that is not given yet, by the event loop's clock."""

    def begin(
        self,
        group: asyncio.TaskGroup,
        control: HubApi,
        data: HubApi,
        check: Callable[[HubRefusal], None],
        *,
        is_movable: bool,
    ) -> None:
        """Use a hub, which has not let this cluster in yet.

        Args:
            group: where tasks run.
            control: for short requests.
            data: for files.
            check: raises what follows from a refusal.
            is_movable: the hub may be lost with its memory, as it is one of the clusters': no
                average is applied that some living cluster lacks.
        """
        self._uploads.clear()
        self._follower = self._giving = None
        self.asked_at = -math.inf
        self._group, self._control, self._data = group, control, data
        self._check, self._is_movable = check, is_movable
        self._sending = asyncio.Lock()

    def start(self) -> None:
        """The hub has let this cluster in."""
        self.stop()
        self._spool.tidy(self.version)
        self._follower = self._group.create_task(self._follow())
        for outer_step in sorted(self.pending):
            self._send(outer_step)

    def stop(self) -> None:
        """Stop for as long as the outer parameters are not the run's."""
        for task in (self._follower, *self._uploads.values()):
            if task is not None:
                task.cancel()
        self._uploads.clear()
        self._follower = None

    @property
    def pending_samples(self) -> list[Interval]:
        """Samples of contributions that are not decided."""
        return [span for pending in self.pending.values() for span in pending.samples]

    def forget(self, version: int) -> None:
        """Another cluster's outer state was taken over: contributions are void."""
        self.version = self._delivered = version
        for outer_step in self.pending:
            self._spool.contribution(outer_step).unlink(missing_ok=True)
        self.pending.clear()

    def contribute(self, pending: Pending) -> None:
        """A contribution lies in the spool."""
        self.pending[pending.outer_step] = pending
        if self._follower is not None:
            self._send(pending.outer_step)

    def applied(self, outer_step: int) -> None:
        """An average has been applied."""
        self.version = outer_step + 1
        for late in [other for other in self.pending if other <= outer_step]:
            # It came after the outer step was decided; `tidy` removes the file.
            del self.pending[late]
            if (task := self._uploads.pop(late, None)) is not None:
                task.cancel()
        self._spool.tidy(self.version)
        self._room.set()

    def _send(self, outer_step: int) -> None:
        upload = self._upload(self.pending[outer_step])
        self._uploads[outer_step] = self._group.create_task(upload)

    async def _upload(self, pending: Pending) -> tuple[int, float]:
        # Returns the bytes that were sent, and the seconds that it took.
        loop = asyncio.get_running_loop()
        channel, path = self._data.channel, self._spool.contribution(pending.outer_step)
        while True:
            try:
                # One after the other: the outer step that is committed first gets the whole line.
                async with self._sending:
                    started, sent = loop.time(), channel.sent_bytes
                    await until_answered(
                        lambda: self._data.contribute(
                            pending.outer_step,
                            path,
                            tokens=pending.tokens,
                            steps=pending.inner_steps,
                            samples=pending.samples,
                            deadline_s=_SEND_S,
                        )
                    )
                    return channel.sent_bytes - sent, loop.time() - started
            except HubRefusal as error:
                if error.kind in _FINAL:
                    self._report(error.what, warns=error.kind != "late")
                    return 0, 0.0
                if error.kind != "early":
                    self._check(error)
                await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        outer_step = self._delivered
        while True:
            while outer_step >= self.version + _AHEAD:
                self._room.clear()
                await self._room.wait()
            answer = await self._committed(outer_step)
            sent_bytes, send_s = await self._end_upload(answer)
            before, started = self._data.channel.received_bytes, loop.time()
            path = self._spool.average(outer_step)
            await self._fetch(answer, path)
            receive_s = loop.time() - started
            if self._is_movable:
                self._spool.note_answer(answer)
                await self._wait_until_all_have(outer_step)
            self._delivered = outer_step + 1
            pending = self.pending.pop(outer_step, None)
            if pending is not None and self._name in answer.weights:
                self._is_averaged(pending.samples)
            self._emit(
                Apply(
                    outer_step=outer_step,
                    path=path if answer.size_bytes else None,
                    weights=answer.weights,
                    refused=answer.refused,
                    size_bytes=answer.size_bytes,
                    sent_bytes=sent_bytes,
                    received_bytes=self._data.channel.received_bytes - before,
                    send_s=send_s,
                    receive_s=receive_s,
                )
            )
            if pending is not None:
                self._spool.contribution(outer_step).unlink(missing_ok=True)
            outer_step += 1

    async def _committed(self, outer_step: int) -> RoundAnswer:
        while True:
            try:
                return await self._control.wait_round(outer_step, _WAIT_S)
            except HubRefusal as error:
                log.warning("%s", error.what)
                await asyncio.sleep(_AGAIN_S)
            except CommunicationError as error:
                log.info("%s", error.what)
                if outer_step in self.pending and "it waits for" in error.what:
                    self._report(error.what, warns=True)

    async def _end_upload(self, answer: RoundAnswer) -> tuple[int, float]:
        task = self._uploads.pop(answer.outer_step, None)
        if task is None:
            return 0, 0.0
        if self._name in answer.weights:
            await asyncio.wait({task}, timeout=_CANCEL_S)  # it is about to find out
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            return 0, 0.0
        return task.result()

    async def _fetch(self, answer: RoundAnswer, path: Path) -> None:
        if not answer.size_bytes:
            path.touch()  # nothing is missing: see `Spool.has`
            return
        while True:
            if path.exists():
                if digest_of(await asyncio.to_thread(hash_chunks, path)) == answer.digest:
                    return
                path.unlink()
            try:
                await until_answered(lambda: self._data.fetch_average(answer, path, _FETCH_S))
            except HubRefusal as error:
                if error.kind == "unknown":
                    self._check(error)
                # It is not kept any more: with the next heartbeat comes the command to pull.
                log.info("%s", error.what)
                await asyncio.sleep(_AGAIN_S)

    async def _wait_until_all_have(self, outer_step: int) -> None:
        while True:
            try:
                if await until_answered(lambda: self._control.held(outer_step, _WAIT_S)):
                    return
            except HubRefusal as error:
                self._check(error)
                await asyncio.sleep(_AGAIN_S)

    # States.

    @property
    def is_giving(self) -> bool:
        """Whether the state is being uploaded."""
        return self._giving is not None and not self._giving.done()

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        """Upload the state for another cluster."""
        self._giving = self._group.create_task(self._give(version, paths, outer_params))

    async def _give(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        give = self._data.give_state
        try:
            await until_answered(lambda: give(version, outer_params, paths, _WHOLE_S))
        except HubRefusal as error:
            if error.kind == "unknown":
                self._check(error)
            log.info("outer the state given to another cluster was refused: %s", error.what)
        self.asked_at = -math.inf

    def pull_state(self) -> None:
        """Fetch another cluster's state, for as long as it takes; then `Adopt` is emitted."""
        self._group.create_task(self._pull())

    async def _pull(self) -> None:
        while True:
            try:
                answer = await self._data.pull_state(self._spool.pulled, _WAIT_S)
                break
            except CommunicationError as error:
                if isinstance(error, HubRefusal) and error.kind in ("unknown", "over"):
                    self._check(error)
                self._report(error.what, warns=True)
                await asyncio.sleep(_AGAIN_S)
        self._emit(
            Adopt(
                version=answer.version,
                paths=tuple(self._spool.pulled / file.name for file in answer.files),
                outer_params=tuple(answer.outer_params),
                source=answer.source,
            )
        )

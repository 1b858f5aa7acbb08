"""Rank 0's client of the hub: a thread that joins the hub, and rejoins it after any failure.

No call of rank 0 waits for the network. Work in the thread must leave the interpreter to the inner
steps: hashes, files and TLS release the GIL.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from isles.errors import CommunicationError, ConfigError, MissingDependencyError
from isles.outer.average import combine
from isles.outer.client.http import WHO_IS_THERE, HubRefusal
from isles.outer.client.meeting import ClientState, HubState, Meeting, RejoinError
from isles.outer.client.session import JOIN_AGAIN, Session
from isles.outer.client.spool import Spool
from isles.outer.layout import FragmentLayout
from isles.outer.messages import Apply, Command, End, Join, Lease, Pending

log = logging.getLogger(__name__)

P = ParamSpec("P")

_PATIENCE_S, _LOOK_S, _CLOSE_S = 90.0, 2.0, 10.0
_PAUSE_S, _LONGEST_PAUSE_S, _HEALTHY_S = 0.5, 2.0, 20.0
_WILL_PASS = {"name_taken", "full"}
"""Refusals of a cluster that was restarted before its former process was given up."""


class _Left(Exception):
    pass


class OuterLink:
    """Link to the other clusters: their commands, and the files of these commands. Base class; does
    nothing on ranks other than 0."""

    def __init__(self, spool: Spool, state: HubState) -> None:
        self.state, self._spool = state, spool
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._news = threading.Condition()

    def contribution_path(self, outer_step: int) -> Path:
        """Path of a contribution; write it (`Cluster.encode`) before `contribute`."""
        return self._spool.contribution(outer_step)

    def state_path(self, fragment: int) -> Path:
        """Path of a fragment's state; write it (`Cluster.export_state`) before `give_state`."""
        return self._spool.given / f"fragment-{fragment}.safetensors"

    def contribute(self, pending: Pending) -> None:
        """Upload a contribution; `Apply` reports the result.

        Its file is at `contribution_path`, and belongs to the client from now on. All outer steps
        before it are contributed to or missed.
        """

    def applied(self, outer_step: int, digest: str) -> None:
        """Report that an average was applied (also an empty one), and the resulting outer
        parameters."""

    def lease(self, num_samples: int) -> None:
        """Request samples; `Lease` brings them. May be called several times, ahead of need."""

    def give_state(self, version: int, outer_params: Sequence[str]) -> None:
        """Report that the state for `SendState` is at the `state_path` of each fragment, and stays
        there."""

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        """Report that `Adopt` is done; contributions in transfer become void."""

    def reset_done(self) -> None:
        """Report that `Reset` is done."""

    def keep_since(self, version: int) -> None:
        """Note that the cluster may have to resume from a checkpoint with `version` outer steps
        applied.

        Until the first call, this is the checkpoint that the cluster was started from.
        """
        self._spool.since = version

    def report(self, **progress: Any) -> None:
        """Set fields of the next `Heartbeat`; cheap."""

    def poll(self) -> list[Command]:
        """The commands since the last call, in order; never waits."""
        found = []
        while not self._commands.empty():
            found.append(self._commands.get())
        return found

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` has something, or the time is over."""
        with self._news:
            self._news.wait_for(lambda: not self._commands.empty(), timeout_s)

    def emit(self, command: Command) -> None:
        """Queue a command for `poll`."""
        with self._news:
            self._commands.put(command)
            self._news.notify_all()

    def close(self, *, leaves: bool = True, has_finished: bool = False) -> None:
        """Close the link, within some seconds.

        Args:
            leaves: tell the hub, so that no cluster waits for this one; it may join again.
            has_finished: also tell the hub that the training is over.
        """


class SingleCluster(OuterLink):
    """Stand-in for the hub in a run of one cluster: each contribution comes back as the average.

    Args:
        next_sample: first sample that was never leased.
    """

    def __init__(
        self, layout: FragmentLayout, name: str, spool: Spool, *, next_sample: int
    ) -> None:
        state = HubState(members=(name,), is_connected=True, is_joined=True, decided=spool.version)
        super().__init__(spool, state)
        self._layout, self._name, self._next_sample = layout, name, next_sample

    def contribute(self, pending: Pending) -> None:
        outer_step, codec = pending.outer_step, self._layout.codec
        path, average = self.contribution_path(outer_step), self._spool.average(outer_step)
        size = 0
        with path.open("rb") as source, average.open("wb") as goal:
            for count in self._layout.piece_counts(outer_step % len(self._layout.fragments)):
                data = source.read(codec.size(count))
                size += goal.write(combine(codec.text, count, [(data, 1.0)]))
        path.unlink()
        weights = {self._name: pending.tokens}
        self.emit(
            Apply(outer_step=outer_step, path=average, weights=weights, refused={}, size_bytes=size)
        )

    def applied(self, outer_step: int, digest: str) -> None:
        self._spool.average(outer_step).unlink(missing_ok=True)

    def lease(self, num_samples: int) -> None:
        start, self._next_sample = self._next_sample, self._next_sample + num_samples
        self.emit(Lease(((start, self._next_sample),)))

    def report(self, **progress: Any) -> None:
        if progress.get("ends"):  # no cluster has an outer step left
            self.emit(End(0))


def in_loop(
    method: Callable[Concatenate[HubClient, P], None],
) -> Callable[Concatenate[HubClient, P], None]:
    """Run a method in the client's thread, without waiting for it."""

    @functools.wraps(method)
    def call(self: HubClient, /, *args: P.args, **kwargs: P.kwargs) -> None:
        work = functools.partial(method, self, *args, **kwargs)
        with suppress(RuntimeError):  # the thread has exited: see `HubState.refusal`
            self.loop.call_soon_threadsafe(work)

    return call


class HubClient(OuterLink):
    """Joins the other clusters, in a thread. Use it from one thread of rank 0.

    No method waits for the network, except `wait` and `close`, which have deadlines.

    Args:
        join: the cluster's join request; the client keeps it up to date.
        meeting: where the clusters meet.
        spool: a folder of this cluster, kept over attempts, for contributions and averages in
            transfer.
        note: prints lines for the user; called in the thread.
        max_bytes_per_s: limit on uploads, and on downloads, on the wire; 0: no limit.
        heartbeat_s: seconds between two heartbeats.
        shows: returns what this cluster shows to people through the hub; see `isles.run.relay`.
    """

    def __init__(
        self,
        join: Join,
        *,
        meeting: Meeting,
        spool: Path,
        note: Callable[[str], None],
        max_bytes_per_s: float = 0.0,
        heartbeat_s: float = 2.0,
        shows: Callable[[], str] = lambda: "",
    ) -> None:
        files = Spool.of(spool, join.pieces, join.version, meeting.kept_averages)
        they_are = meeting.they_are
        self._client = ClientState(join, files, self.emit, note, max_bytes_per_s, shows, they_are)
        super().__init__(files, self._client.state)
        self._meeting, self._heartbeat_s = meeting, heartbeat_s
        self._session: Session | None = None
        self._left: tuple[bool, bool] | None = None
        self._refused_at: float | None = None
        self._leaving, self._begin_anew = asyncio.Event(), asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._task = self.loop.create_task(self._run())
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    # Reports from rank 0.

    @in_loop
    def contribute(self, pending: Pending) -> None:
        self._client.pending[pending.outer_step] = pending
        if self._session is not None:
            self._session.contribute(pending)

    @in_loop
    def applied(self, outer_step: int, digest: str) -> None:
        client = self._client
        client.outer_params[outer_step % len(client.outer_params)] = digest
        self._spool.note_outer_params(outer_step, digest)
        self._spool.version = outer_step + 1
        for late in [other for other in client.pending if other <= outer_step]:
            del client.pending[late]  # it arrived after the outer step was decided
        self._spool.tidy()
        if self._session is not None:
            self._session.applied(outer_step, digest)

    @in_loop
    def lease(self, num_samples: int) -> None:
        self._client.wanted.append(num_samples)
        if self._session is not None:
            self._session.lease(num_samples)

    @in_loop
    def give_state(self, version: int, outer_params: Sequence[str]) -> None:
        if self._session is not None:
            paths = [self.state_path(fragment) for fragment in range(len(outer_params))]
            self._session.give_state(version, paths, outer_params)

    @in_loop
    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        client, spool = self._client, self._spool
        client.outer_params = list(outer_params)
        spool.version = client.delivered = version
        for outer_step in client.pending:
            spool.contribution(outer_step).unlink(missing_ok=True)
        client.pending.clear()
        shutil.rmtree(spool.pulled, ignore_errors=True)
        self._begin_anew.set()

    @in_loop
    def reset_done(self) -> None:
        self._client.reset_done = self._client.reset_reason

    def report(self, **progress: Any) -> None:
        self._client.progress = progress

    def close(self, *, leaves: bool = True, has_finished: bool = False) -> None:
        self._leave(leaves and self.state.is_connected, has_finished)
        self._thread.join(_CLOSE_S + self._meeting.close_s)
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(_CLOSE_S)

    @in_loop
    def _leave(self, leaves: bool, has_finished: bool) -> None:
        self._left = leaves, has_finished
        self._leaving.set()

    # The thread.

    def _serve(self) -> None:
        try:
            self.loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException:  # the edge of a thread
            log.exception("hub client thread stopped")
        finally:
            with suppress(RuntimeError):
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    async def _run(self) -> None:
        # One session after the other, until `close`, or until the hub refuses for good.
        pause_s = _PAUSE_S
        try:
            while True:
                started = time.monotonic()
                error = await self._take_part()
                if isinstance(error, _Left) or self._is_final(error):
                    return
                is_healthy = time.monotonic() - started > _HEALTHY_S
                pause_s = _PAUSE_S if is_healthy else min(2 * pause_s, _LONGEST_PAUSE_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), pause_s)
                    return
        finally:
            leaves, has_finished = self._left or (False, False)
            await self._meeting.close(waits=leaves and has_finished)

    def _is_final(self, error: BaseException) -> bool:
        client, meeting = self._client, self._meeting
        if isinstance(error, HubRefusal) and error.kind in _WILL_PASS:
            self._refused_at = self._refused_at or time.monotonic()
        refused_s = time.monotonic() - (self._refused_at or time.monotonic())
        match error:
            case RejoinError():
                log.info("rejoining: %s", error)
            case HubRefusal() if error.kind in JOIN_AGAIN or error.kind == "early":
                # early: a hub that is gone committed it, and this hub does not know it.
                log.info("rejoining: %s", error.what)
            case HubRefusal() if error.kind == "ahead" and meeting.move_here():
                log.info("moving the hub here: %s", error.what)
            case HubRefusal() if (error.kind in _WILL_PASS and refused_s < _PATIENCE_S) or (
                error.kind in WHO_IS_THERE and client.state.is_joined
            ):
                client.is_lost(meeting.explain(error.what))
            case HubRefusal() | ConfigError() | MissingDependencyError():
                what = f"the {meeting.refuser} refuses this cluster: {error.what}; {error.fix}"
                client.report(what, warns=True)
                client.state.refusal = error
                return True
            case CommunicationError():
                client.is_lost(meeting.explain(error.what))
            case _:
                what = "the hub client failed"
                log.error(what, exc_info=error)
                client.report(f"{what} and restarts ({error!r})", warns=True)
        return False

    async def _take_part(self) -> BaseException:
        # Runs while the hub knows this cluster; returns why it ended.
        client = self._client
        self._begin_anew.clear()
        try:
            api = await self._meeting.open(client)
            async with api as requests, asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                session = Session(client, self._meeting, requests, group, self._heartbeat_s)
                group.create_task(self._end(session))
                await session.join()
                self._session, self._refused_at = session, None
                await self._begin_anew.wait()
                raise RejoinError("copying the state of another cluster")
        except Exception as group_error:
            error: BaseException = group_error
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return error
        finally:
            self._session = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._meeting.check()

    async def _end(self, session: Session) -> None:
        await self._leaving.wait()
        leaves, has_finished = self._left or (False, False)
        if leaves:
            await session.leave(has_finished=has_finished)
        raise _Left

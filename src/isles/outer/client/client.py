"""Rank 0's end of the hub: a thread in which the `Session` runs; survives whatever happens there.

Nothing that is called here waits for the network. What is computed in the thread must leave the
interpreter to the inner steps: hashes, files and TLS release its lock.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from isles.outer.average import combine
from isles.outer.client.events import (
    Claimed,
    Committed,
    Ended,
    Event,
    Interval,
    Joined,
    LinkSettings,
    Member,
    Progress,
    Sent,
)
from isles.outer.client.session import Session
from isles.outer.client.transfer import Spool
from isles.outer.layout import Layout

log = logging.getLogger(__name__)

_KEPT_AVERAGES = 8
"""Engine hivemind: so many averages stay for clusters that missed them."""

_PEERS_END_S = 15.0
"""Engine hivemind: until others have left the hub that is hosted here, and the daemon has ended."""


def member_of(
    layout: Layout, *, name: str, member_id: str, identity: Mapping[str, str] | None = None
) -> Member:
    """What a cluster joins with.

    Args:
        layout: of the run.
        name: of the cluster.
        member_id: 32 hexadecimal digits (`secrets.token_hex(16)`), kept for the whole run.
        identity: what else must be equal on all clusters: outer settings, the model's name …
    """
    fragments = range(len(layout.fragments))
    return Member(
        name=name,
        member_id=member_id,
        identity={"layout": layout.digest, **(identity or {})},
        codec=layout.codec.text,
        pieces=[layout.piece_counts(fragment) for fragment in fragments],
    )


class Link:
    """Joins the other clusters at once, in a thread; the first event is `Joined`, later or never.

    To be used by one thread of rank 0. No method waits for the network, save `wait` and `close`,
    which have deadlines.

    Args:
        member: who this cluster is; see `member_of`.
        settings: how it reaches the hub.
        join_file: holds the join line (mode 0600).
        spool: a folder of this cluster's own, kept over attempts; contributions and averages lie
            in it for a while.
        version: turns applied to the outer parameters (0, or what the checkpoint says).
        outer_params: the digest of each fragment's outer parameters (`Cluster.digest`).
        holding: samples claimed before this attempt that the cluster still means to train on, or
            has trained on since its last contribution that is in an average. What it has claimed
            and does not hold is dealt to others. From here on the link keeps account.
    """

    def __init__(
        self,
        member: Member,
        settings: LinkSettings,
        *,
        join_file: Path,
        spool: Path,
        version: int,
        outer_params: Sequence[str],
        holding: Sequence[Interval] = (),
    ) -> None:
        self._more_s = 0.0 if settings.hivemind is None else _PEERS_END_S
        kept = 0 if settings.hivemind is None else _KEPT_AVERAGES
        self._spool = Spool.of(spool, member.pieces, version, kept)
        self._num_fragments = len(member.pieces)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._session = Session(
            member, settings, join_file, self._spool, version, outer_params, holding, self._pass_on
        )
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._session.run())
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException:  # the edge of a thread
            log.exception("what speaks with the hub has ended")
        finally:
            with suppress(RuntimeError):
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _pass_on(self, event: Event) -> None:
        with self._news:
            self._events.put(event)
            self._news.notify_all()

    def _cancel(self) -> None:
        self._task.cancel()

    def _do(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it has ended: see `Refused`
            self._loop.call_soon_threadsafe(call)

    @property
    def members(self) -> tuple[str, ...]:
        """Who takes part now, this cluster too."""
        return self._session.members

    @property
    def pace(self) -> int:
        """Inner steps that a round should have for the slowest link of all; 0: not known."""
        return self._session.pace

    @property
    def is_connected(self) -> bool:
        """Whether the hub answers."""
        return self._session.is_connected

    @property
    def sent_bytes(self) -> int:
        """By this attempt, to the hub."""
        return self._session.moved[0]

    @property
    def received_bytes(self) -> int:
        """By this attempt, from the hub."""
        return self._session.moved[1]

    # What rank 0 says.

    def contribution_path(self, turn: int) -> Path:
        """Where a contribution is to be written (`Cluster.encode`) before `contribute`."""
        return self._spool.contribution(turn)

    def state_paths(self) -> list[Path]:
        """Where the state is to be written (`Cluster.export_state`) before `give_state`."""
        folder = self._spool.given
        return [folder / f"fragment-{i}.safetensors" for i in range(self._num_fragments)]

    def contribute(self, sent: Sent) -> None:
        """Bring a contribution into a turn; `Committed` tells what became of it.

        Its file lies at `contribution_path`, and is the link's from now on, which removes it. The
        turn is the one that this cluster is at: all before it are contributed to or missed.
        """
        self._do(lambda: self._session.contribute(sent))

    def applied(self, turn: int, digest: str) -> None:
        """An average was applied (also an empty one); its file is the link's again.

        Args:
            turn: of the average.
            digest: `Applied.digest`, of the fragment's outer parameters thereafter.
        """
        self._do(lambda: self._session.applied(turn, digest))

    def claim(self, num_samples: int) -> None:
        """Ask for samples; `Claimed` brings them. May be asked several times, ahead."""
        self._do(lambda: self._session.claim(num_samples))

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        """The answer to `Donate`: safetensors, one for each fragment; they must not change.

        Args:
            version: turns applied to all of them.
            paths: see `state_paths`.
            outer_params: digest of each fragment's outer parameters.
        """
        self._do(lambda: self._session.give_state(version, paths, outer_params))

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        """The answer to `StateReady`: the state was imported; contributions under way are void.

        Args:
            version: turns applied to it.
            outer_params: `Cluster.digest` of each fragment.
        """
        self._do(lambda: self._session.adopted(version, outer_params))

    def keep_since(self, version: int) -> None:
        """The cluster may have to go on from a checkpoint with so many turns applied.

        Until this is called first it may be the one that it has been started from.
        """
        self._spool.since = version

    def obeyed(self) -> None:
        """The answer to `Reset`: the weights are the outer parameters again."""
        self._do(self._session.obeyed)

    def progress(self, progress: Progress) -> None:
        """What the others are told of this cluster with the next heartbeat. Costs nothing."""
        self._session.progress = progress

    # What rank 0 hears.

    def poll(self) -> list[Event]:
        """What has happened since the last call, in order; never waits."""
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something; False: nothing within the time."""
        end = time.monotonic() + timeout_s
        with self._news:
            while self._events.empty():
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return False
                self._news.wait(left_s)
        return True

    def close(
        self, *, leaves: bool = True, has_finished: bool = False, timeout_s: float = 10.0
    ) -> None:
        """End the thread, within a time.

        Args:
            leaves: tell the hub, so that nobody waits for this cluster; it may join again.
            has_finished: tell it that the training is over, too.
            timeout_s: for telling it.
        """
        tells = leaves and self.is_connected
        self._do(lambda: self._session.leave(tells=tells, has_finished=has_finished))
        self._thread.join(timeout_s + self._more_s)
        if self._thread.is_alive():
            self._do(self._cancel)
            self._thread.join(timeout_s)


class Alone:
    """Stands where `Link` would: every turn is decided at once, samples come in their order.

    Args:
        layout: of the run.
        name: of the cluster.
        spool: folder for the contributions.
        version: turns that have been applied.
        next_sample: the first that was never dealt.
    """

    sent_bytes = received_bytes = pace = 0
    is_connected = True

    def __init__(
        self, layout: Layout, name: str, spool: Path, *, version: int, next_sample: int
    ) -> None:
        self._layout, self._name, self._spool = layout, name, spool
        self._next_sample = next_sample
        self._events: list[Event] = [Joined(standing="current", turn=version, from_turn=version)]
        self.members: tuple[str, ...] = (name,)
        spool.mkdir(mode=0o700, exist_ok=True)

    def contribution_path(self, turn: int) -> Path:
        """Where a contribution is to be written."""
        return self._spool / f"contribution-{turn:08d}"

    def state_paths(self) -> list[Path]:
        return []  # nobody asks for the state

    def contribute(self, sent: Sent) -> None:
        """Average a contribution with no other."""
        path, average = self.contribution_path(sent.turn), self._average(sent.turn)
        text = self._layout.codec.text
        size = 0
        with path.open("rb") as source, average.open("wb") as goal:
            for count in self._layout.piece_counts(sent.turn % len(self._layout.fragments)):
                data = source.read(self._layout.codec.size(count))
                size += goal.write(combine(text, count, [(data, 1.0)]))
        path.unlink()
        weights = {self._name: sent.tokens}
        self._events.append(
            Committed(
                turn=sent.turn,
                path=average,
                is_in=True,
                weights=weights,
                refused={},
                size_bytes=size,
            )
        )

    def _average(self, turn: int) -> Path:
        return self._spool / f"average-{turn:08d}"

    def applied(self, turn: int, digest: str) -> None:
        """An average is needed no more."""
        self._average(turn).unlink(missing_ok=True)

    def claim(self, num_samples: int) -> None:
        """Deal samples."""
        start, self._next_sample = self._next_sample, self._next_sample + num_samples
        self._events.append(Claimed(samples=((start, self._next_sample),)))

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        raise AssertionError("nobody asks for the state")

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        raise AssertionError("nobody gives a state")

    def obeyed(self) -> None:
        raise AssertionError("nobody orders anything")

    def keep_since(self, version: int) -> None:
        pass  # an average is this cluster's own contribution: its steps are done again

    def progress(self, progress: Progress) -> None:
        """Nobody has a turn that is still to come."""
        if progress.ends:
            self._events.append(Ended(turns=0))

    def poll(self) -> list[Event]:
        """What has happened since the last call."""
        found, self._events = self._events, []
        return found

    def wait(self, timeout_s: float) -> bool:
        """Whether `poll` has something."""
        return bool(self._events)

    def close(
        self, *, leaves: bool = True, has_finished: bool = False, timeout_s: float = 10.0
    ) -> None:
        pass


Line = Link | Alone

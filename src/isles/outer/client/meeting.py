"""The place where clusters meet, and what a cluster can request there.

`Meeting` has three implementations: `HubMeeting` (`api.py`), `BucketMeeting` (`bucket/api.py`) and
`HivemindMeeting` (`hivemind/host.py`). Only the construction (`trainer/build.py`) knows which one a
run has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from isles.errors import UserError
from isles.facts.units import format_duration, printable
from isles.outer.client.http import RateLimit
from isles.outer.client.spool import Spool
from isles.outer.messages import (
    Command,
    Heartbeat,
    HeartbeatAnswer,
    Interval,
    Join,
    JoinAnswer,
    Pending,
    RoundAnswer,
    StateAnswer,
)
from isles.outer.samples import joined

log = logging.getLogger(__name__)

LONGEST = 2000
"""Limit of a note, in characters."""
_ON_THE_WIRE = 1.05
"""Bytes on the wire per byte of a file: TLS, HTTP and TCP add theirs."""


@dataclass(slots=True)
class HubState:
    """Known state of the hub. The client's thread writes it, rank 0 reads it.

    Args:
        members: the clusters that take part now, this one included.
        sync_every: inner steps per round that the slowest link of all needs; 0: unknown.
        is_joined: whether the hub has accepted this cluster.
        is_behind: whether the outer parameters here differ from the run's; `Adopt` will come.
        decided: outer steps that were decided before this cluster joined, without its part.
        closing: an outer step that will be closed without this cluster, and the seconds left.
        refusal: the hub refuses this cluster for good.
        lost_at: start of the time without answers of the hub, by `time.monotonic`; None: it
            answers.
        why: the last report.
        shown: engine bucket: what all clusters show to people, in the form of a hub.
    """

    members: tuple[str, ...] = ()
    sync_every: int = 0
    is_connected: bool = False
    is_joined: bool = False
    is_behind: bool = False
    decided: int = 0
    closing: tuple[int, float] | None = None
    refusal: UserError | None = None
    lost_at: float | None = None
    why: str = ""
    shown: dict[str, Any] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0

    def is_away_for(self, seconds: float) -> bool:
        """True if the hub has not answered for this long, or refuses this cluster."""
        since = self.lost_at
        is_long = since is not None and time.monotonic() - since >= seconds
        return is_long or self.refusal is not None


class RejoinError(Exception):
    """Ends a session; the next may begin immediately."""


class ClientState:
    """State of the client over all sessions: contributions, averages, and its view of the hub."""

    def __init__(
        self,
        join: Join,
        spool: Spool,
        emit: Callable[[Command], None],
        note: Callable[[str], None],
        max_bytes_per_s: float,
        shows: Callable[[], str],
        they_are: str,
    ) -> None:
        self.shows = shows
        self.first_join, self.spool, self.emit, self._note = join, spool, emit, note
        self.state = HubState()
        self.progress: dict[str, Any] = {"step": 0}
        """Fields of the next heartbeat."""
        self.up = RateLimit(max_bytes_per_s / _ON_THE_WIRE)
        self.down = RateLimit(max_bytes_per_s / _ON_THE_WIRE)
        self.outer_params = list(join.outer_params)
        self.holding = joined(join.holding)
        """Samples of this cluster that are in no average."""
        self.pending: dict[int, Pending] = {}
        self.delivered = join.version
        """Averages given to rank 0."""
        self.wanted: list[int] = []
        self.reset_reason = self.reset_done = ""
        self.they_are = they_are

    def note(self, text: str) -> None:
        """Tell the user, shortened, because the hub may have chosen the text."""
        self._note(printable(text, longest=LONGEST))

    def report(self, text: str, *, warns: bool = False) -> None:
        """Report the state to the log, or to the user."""
        text = self.state.why = printable(text, longest=LONGEST)
        if warns:
            self.note(text)
        else:
            log.info("outer %s", text)

    def is_lost(self, why: str) -> None:
        if self.state.lost_at is None:
            self.state.lost_at, self.state.is_connected = time.monotonic(), False
            meanwhile = "training continues" if self.state.is_joined else "this cluster waits"
            self.report(f"{self.they_are} unreachable, {meanwhile}: {why}", warns=True)
            self.state.why = why

    def is_found(self) -> None:
        if self.state.lost_at is not None:
            away = format_duration(time.monotonic() - self.state.lost_at)
            self.state.lost_at, self.state.is_connected = None, True
            self.note(f"{self.they_are} back after {away}")


class ClusterApi(Protocol):
    """The requests of one cluster; for one event loop.

    Each method has a deadline in seconds. It raises `HubRefusal` if the hub or the bucket refuses,
    and `DeadlineError` after the deadline.
    """

    id: str
    """The member's id: 32 hexadecimal digits that the cluster keeps for the whole run."""

    # Membership.

    async def join(self, join: Join, deadline_s: float) -> JoinAnswer:
        """Join the run; also after a restart of this cluster, or after the hub forgot it."""
        ...

    async def heartbeat(self, heartbeat: Heartbeat, deadline_s: float) -> HeartbeatAnswer: ...

    async def show(self, record: str, deadline_s: float) -> None:
        """Publish what this cluster shows to people."""

    async def leave(self, deadline_s: float, *, has_finished: bool = False) -> None:
        """Leave the run; untrained leased samples go to other clusters, immediately or after a
        while."""

    async def reset_done(self, deadline_s: float) -> None: ...

    async def lease(self, samples: int, deadline_s: float) -> Sequence[Interval]:
        """Lease samples for this cluster alone."""
        ...

    # Contributions and averages.

    async def contribute(
        self,
        outer_step: int,
        path: Path,
        *,
        tokens: int,
        steps: int,
        samples: Sequence[Interval],
        deadline_s: float,
    ) -> None:
        """Upload a contribution, or the rest of it, and have it counted.

        Args: as in `Contribution`; path: its encoded bytes, which must not change during the call.

        Raises:
            HubRefusal: kind `late`: the outer step is decided without it; `refused`: it contains
                values that are not finite; `behind`: the state must be pulled first.
        """

    async def wait_round(self, outer_step: int, deadline_s: float) -> RoundAnswer:
        """Wait until an outer step is committed.

        Raises:
            DeadlineError: it is not committed by the deadline; the message lists the missing
                clusters.
        """
        ...

    async def fetch_average(self, answer: RoundAnswer, target: Path, deadline_s: float) -> None:
        """Fetch the average of a committed outer step. The target exists only when it is complete.

        Raises:
            HubRefusal: the average is not possible in this run.
        """

    async def held(self, outer_step: int, deadline_s: float) -> bool:
        """Report that this cluster has an average; returns whether all living clusters have it by
        the deadline."""
        ...

    async def applied(self, outer_step: int, outer_params: str, deadline_s: float) -> None:
        """Report the digest of the outer parameters after an average."""

    # States.

    async def give_state(
        self, version: int, outer_params: Sequence[str], files: Sequence[Path], deadline_s: float
    ) -> None:
        """Upload the outer state, or the rest of it, for a cluster that is behind.

        Args: as in `StateOffer`; files: safetensors, which must not change during the call.
        """

    async def pull_state(self, folder: Path, deadline_s: float) -> StateAnswer:
        """Fetch the state from another cluster into a folder; resumes an interrupted transfer.

        Raises:
            DeadlineError: no state has arrived by the deadline; the message has its source.
        """
        ...


class Meeting(Protocol):
    """The place where the clusters of a run meet. It outlives sessions; for one event loop."""

    refuser: str
    """Its name in "the ... refuses this cluster"."""
    they_are: str
    """Its name in "... unreachable"."""
    kept_averages: int = 0
    """Number of averages that stay for clusters that missed them."""
    close_s: float = 0.0
    """Seconds that `close` may need."""
    may_forget: bool = False
    """Whether averages can be lost there, so that all living clusters must have one before any
    applies it."""

    async def open(self, client: ClientState) -> AbstractAsyncContextManager[ClusterApi]:
        """Prepare a session; returns its requests.

        Raises:
            UserError: this cluster cannot take part.
        """
        ...

    def check(self) -> None:
        """Raise the error that has ended a background task, or `RejoinError` if the place has
        moved. Called every few seconds of a session."""

    async def close(self, *, waits: bool) -> None:
        """Close for good; with `waits` after the other clusters have finished, within `close_s`."""

    def has_joined(self) -> None:
        """Note that this cluster was accepted, so its weights are the run's."""
        return

    def move_here(self) -> bool:
        """Move the place to this cluster, which has applied more outer steps than are known there.

        Returns:
            False: this kind of place does not move.
        """
        return False

    def explain(self, why: str) -> str:
        """The reason to show for an error of the connection."""
        return why

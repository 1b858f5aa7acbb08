"""How many inner steps lie between two outer steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never

from isles.config.sections.outer import DiLoCoConfig
from isles.errors import CommunicationError, ConfigError, UserError
from isles.facts.units import format_duration
from isles.outer.client.client import Line
from isles.outer.client.events import (
    Behind,
    Claimed,
    Committed,
    Donate,
    Ended,
    Event,
    Joined,
    Members,
    Note,
    Refused,
    RendezvousFound,
    RendezvousLost,
    Reset,
    SamplesLost,
    StateReady,
    TurnDue,
)
from isles.outer.client.events import (
    Progress as SentProgress,
)

log = logging.getLogger(__name__)


class Recorder(Protocol):
    """The records of the run, on rank 0; see `isles.train.record`."""

    status: dict[str, Any]

    def note(self, text: str) -> None: ...

    def phase(self, phase: str, detail: str = "") -> None: ...

    def update(self, **fields: Any) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...


class Progress(Protocol):
    """How far the run has come; see `isles.train.progress`."""

    step: int
    samples: int
    target_tokens: int

    def skip_to(self, step: int) -> None: ...


class Meter(Protocol):
    """Times of the inner steps; see `isles.train.metrics`."""

    def pause(self, phase: str) -> float: ...

    def resume(self, paused_at: float) -> None: ...


LEAST, MOST = 10, 1000
"""Fewer hardly pay for the outer optimizer; with more, clusters learn too far apart."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """After which inner step each turn is due.

    Args:
        sync_every: inner steps in which every weight is averaged once.
        fragments: turns in that time.
        warmup_rounds: so many rounds come first, of other length.
        warmup_sync_every: inner steps of each of them.
    """

    sync_every: int
    fragments: int
    warmup_rounds: int = 0
    warmup_sync_every: int = 0

    def round_steps(self, turn: int) -> int:
        """Inner steps of the round that a turn belongs to."""
        is_warmup = turn // self.fragments < self.warmup_rounds
        return self.warmup_sync_every if is_warmup else self.sync_every

    def step_of(self, turn: int) -> int:
        """The inner step after which a turn is due."""
        rounds = turn // self.fragments
        short = min(rounds, self.warmup_rounds)
        before = short * self.warmup_sync_every + (rounds - short) * self.sync_every
        place = turn % self.fragments + 1
        return before + place * self.round_steps(turn) // self.fragments


def auto_sync_every(
    *, size_bytes: int, link_bytes_per_s: float, step_s: float, max_overhead: float
) -> int:
    """Inner steps such that waiting for the link costs no more than a part of the time.

    Args:
        size_bytes: what a cluster sends and takes in one round, all fragments together.
        link_bytes_per_s: of the slowest cluster's link, as measured.
        step_s: of an inner step.
        max_overhead: which part of the inner steps' time the link may take.

    Returns:
        Between LEAST and MOST.
    """
    wait_s = size_bytes / link_bytes_per_s
    return max(LEAST, min(MOST, math.ceil(wait_s / (max_overhead * step_s))))


_OPEN_TURNS = 8
"""A contribution is sent for so many turns from the next one that is decided, at most."""
_LEAST_STEPS_AHEAD = 8
_MOST_STEPS_AHEAD = 1000
_USUAL, _LONG = 0.9, 3.0


@dataclass(frozen=True, slots=True)
class Contribute:
    """Make this cluster's contribution to a turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class Take:
    """Take in the average of a turn.

    Args:
        event: what is known of it.
        step: the number that the last step has at least, from then on.
    """

    event: Committed
    step: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over another cluster's state.

    Args:
        event: where it is.
        step: as in `Take`.
    """

    event: StateReady
    step: int


@dataclass(frozen=True, slots=True)
class UseReserve:
    """Go on with samples that nobody deals, as long as the rendezvous is away."""

    count: int


Order = Contribute | Take | Adopt | UseReserve | Claimed | SamplesLost | Donate | Reset | Ended
"""What rank 0 tells the ranks of its cluster to do between two inner steps, in this order."""


@dataclass(slots=True)
class SyncState:
    """How the outer steps stand, as all ranks know it; what decisions rest on.

    Args:
        version: turns that have been applied.
        steps: inner steps that this cluster has made, in all its attempts.
        contributed_at: `steps` at the last contribution.
        sent: turns whose contribution no average has answered yet.
        has_learnt: whether there is anything to contribute.
        step: the number of the last inner step.
        samples_left: that are dealt, and not read.
    """

    version: int
    steps: int
    contributed_at: int
    sent: tuple[int, ...]
    has_learnt: bool
    step: int
    samples_left: int


@dataclass(slots=True)
class Pace:
    """How long steps and turns take here."""

    step_s: float = 0.0
    bytes_per_s: float = 0.0
    round_bytes: int = 0
    _at: float | None = None
    _turns: dict[int, tuple[int, float]] = field(default_factory=dict)

    def step_done(self, paused_s: float) -> None:
        """An inner step is over; some of the time since the last one was no part of it."""
        now = time.perf_counter()
        took = 0.0 if self._at is None else now - self._at - paused_s
        self._at = now
        if self.step_s:  # one that saves or evaluates says little of the others
            took = _USUAL * self.step_s + (1 - _USUAL) * min(took, _LONG * self.step_s)
        self.step_s = took

    def turn_done(self, event: Committed, num_fragments: int) -> None:
        """A turn is over. Fragments differ in size: what counts is the last turn of each."""
        moved, took = event.sent_bytes + event.received_bytes, event.send_s + event.receive_s
        if moved and took > 0:
            self._turns[event.turn % num_fragments] = moved, took
            all_moved = sum(moved for moved, _ in self._turns.values())
            self.bytes_per_s = all_moved / sum(took for _, took in self._turns.values())
            self.round_bytes = all_moved * num_fragments // len(self._turns)


class OuterCoordinator:
    """Rank 0's half of the outer steps.

    Args:
        config: the section of the run file.
        line: to the other clusters.
        num_fragments: of the layout.
        batch: samples in an inner step.
        total_steps: of the run, if it is known.
        recorder: for notes.
        clock: seconds since some time or other.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        line: Line,
        *,
        num_fragments: int,
        batch: int,
        total_steps: int | None,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.line = line
        self.pace = Pace()
        self.is_joined = self.is_behind = False
        self.decided = 0
        """Turns that were decided before this cluster came: it takes them in, and has no part."""
        self.uses_reserve = False
        """Whether the samples that are read now were dealt by nobody."""
        self._config, self._num_fragments = config, num_fragments
        self._schedule = schedule_of(config, num_fragments)
        self._batch, self._total_steps = batch, total_steps
        self._recorder, self._clock = recorder, clock
        self._began = clock()
        self._orders: list[Order] = []
        self._asked = self._wanted_pace = 0
        self._due: TurnDue | None = None
        self._refusal: Refused | None = None
        self._lost_at: float | None = None
        self._why = ""
        self._ends = False

    @property
    def is_refused(self) -> bool:
        """Whether the rendezvous does not let this cluster in: nothing will come."""
        return self._refusal is not None

    def interval(self, turn: int) -> int:
        """Inner steps from the turn before to this one."""
        return max(1, self.round_steps(turn) // self._num_fragments)

    def round_steps(self, turn: int) -> int:
        """Inner steps in which all fragments have a turn, around this one."""
        if self._schedule is not None:
            return self._schedule.round_steps(turn)
        return max(self.line.pace, self._wanted_pace, LEAST)

    def _choose_pace(self) -> None:
        pace = self.pace
        if self._config.sync_every == "auto" and pace.bytes_per_s and pace.step_s:
            self._wanted_pace = auto_sync_every(
                size_bytes=pace.round_bytes,
                link_bytes_per_s=pace.bytes_per_s,
                step_s=pace.step_s,
                max_overhead=self._config.max_sync_overhead,
            )

    def step_of(self, turn: int) -> int:
        """The step after which a turn is due, at the latest; with `auto` nobody can say."""
        return 0 if self._schedule is None else self._schedule.step_of(turn)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Hear what has happened, or wait for it."""
        if timeout_s:
            self.line.wait(timeout_s)
        for event in self.line.poll():
            self._hear(event)

    def plan(self, sync_state: SyncState) -> bool:
        """Decide what is to be done after the step that begins now; whether there is anything."""
        self.listen()
        self._claim(sync_state)
        changes = any(isinstance(order, Take | Adopt | Reset) for order in self._orders)
        if not changes and self._is_due(sync_state):
            self._orders.append(Contribute(self.next_turn(sync_state)))
        self.report(sync_state)
        return bool(self._orders)

    def report(self, sync_state: SyncState, *, ends: bool = False) -> None:
        """What the others are told of this cluster.

        Args:
            sync_state: how it stands.
            ends: nothing of it is left that is in no average, nor will be.
        """
        self._ends = self._ends or ends
        status = self._recorder.status
        between = status.get("outer") or {}
        progress = SentProgress(
            step=sync_state.step,
            since=sync_state.steps - sync_state.contributed_at,
            tokens_per_s=_finite(status.get("tokens_per_second")) or 0.0,
            phase=str(status["phase"]),
            pace=self._wanted_pace,
            loss=_finite(status.get("loss")),
            exposed_s=between.get("exposed_s", 0.0),
            hidden_s=between.get("hidden_s", 0.0),
            ends=self._ends,
        )
        self.line.progress(progress)

    def take_orders(self) -> list[Order]:
        """What was decided, for all ranks."""
        found, self._orders = self._orders, []
        self._asked -= sum(b - a for o in found if isinstance(o, Claimed) for a, b in o.samples)
        return found

    def next_turn(self, sync_state: SyncState) -> int:
        """The turn to which this cluster contributes next."""
        return max(sync_state.version, max(sync_state.sent, default=-1) + 1)

    def restock(self, sync_state: SyncState, *, is_late: bool) -> None:
        """The samples are used up: ask for more, or go on without."""
        self._claim(sync_state)
        has_news = any(isinstance(order, Claimed) for order in self._orders)
        if is_late and not has_news and sync_state.samples_left < self._batch:
            self._orders.append(UseReserve(self._wanted(sync_state)))
            if not self.uses_reserve:
                self._recorder.note(
                    f"no samples are dealt: until {self._they_are} back this cluster reads samples "
                    "that others may have"
                )
            self.uses_reserve = True

    def fault(self, *, is_new: bool) -> UserError | None:
        """Why this cluster cannot take part in the run, if so.

        Args:
            is_new: it has never taken part: without the others it must not begin.
        """
        if self._refusal is not None:
            told = self._refusal
            id = "rendezvous.refused"
            return ConfigError(told.what, where=told.where, fix=told.fix, id=id)
        if not is_new or self.is_joined:
            return None
        since = self._began if self._lost_at is None else self._lost_at
        if self._clock() - since < self._config.deadline:
            return None
        limit = format_duration(self._config.deadline)
        if self._config.engine == "hivemind":
            return CommunicationError(
                f"not enough other clusters within {limit}: {self._why or 'nothing is known'}",
                where="outer.hivemind.initial_peers",
                fix="do the others run? does this machine reach the address? outer.min_clusters "
                "begins with fewer, outer.deadline waits longer",
                id="hivemind.peers",
            )
        return CommunicationError(
            f"the rendezvous has not answered within {limit}: {self._why or 'nothing is known'}",
            where=self._config.rendezvous or "the join line in the run directory",
            fix="is it running (`isles rendezvous`)? can this machine reach its port? "
            "outer.deadline waits longer",
            id="rendezvous.silent",
        )

    def _claim(self, sync_state: SyncState) -> None:
        wanted = self._wanted(sync_state)
        if sync_state.samples_left + self._asked < wanted:
            self._asked += wanted
            self.line.claim(wanted)

    def _wanted(self, sync_state: SyncState) -> int:
        steps = self.round_steps(self.next_turn(sync_state))
        steps = min(max(steps, _LEAST_STEPS_AHEAD), _MOST_STEPS_AHEAD)
        if self._total_steps is not None:
            steps = min(steps, self._total_steps - sync_state.step)
        return steps * self._batch

    def _is_due(self, sync_state: SyncState) -> bool:
        turn = self.next_turn(sync_state)
        fragment = turn % self._num_fragments
        if self.is_behind or not self.decided <= turn < sync_state.version + _OPEN_TURNS:
            return False
        if any(other % self._num_fragments == fragment for other in sync_state.sent):
            return False
        if self._due is not None and self._due.turn == turn and sync_state.has_learnt:
            log.info(
                "outer turn=%d closes in seconds=%.1f: contributing what there is",
                turn,
                self._due.due_in_s,
            )
            return True
        since = sync_state.steps + 1 - sync_state.contributed_at
        return since >= self.interval(turn) and sync_state.step + 1 >= self.step_of(turn)

    def _hear(self, event: Event) -> None:
        self._tell(event)
        match event:
            case Joined():
                # Said here already: `Behind`, which tells why, may be heard a moment later.
                self.is_joined, self.is_behind = True, event.standing == "behind"
                self.decided = 0 if self.is_behind else event.turn
            case TurnDue():
                self._due = event
            case Committed():
                self.pace.turn_done(event, self._num_fragments)
                self._choose_pace()
                self._orders.append(Take(event, self._capped(self.step_of(event.turn))))
            case Behind():
                self.is_behind = True
            case StateReady():
                self.is_behind = False
                self._orders = [order for order in self._orders if not isinstance(order, Take)]
                self._orders.append(Adopt(event, self._capped(self.step_of(event.version - 1))))
            case Claimed() | SamplesLost() | Donate() | Reset() | Ended():
                self.uses_reserve = self.uses_reserve and not isinstance(event, Claimed)
                self._orders.append(event)
            case Refused():
                self._refusal = event
            case RendezvousLost():
                self._lost_at, self._why = self._lost_at or self._clock(), event.why
            case RendezvousFound():
                self._lost_at = None
            case Note():
                self._why = event.text
            case Members():
                pass  # told, and that is all
            case _:
                assert_never(event)

    @property
    def _they_are(self) -> str:
        is_hivemind = self._config.engine == "hivemind"
        return "the other clusters are" if is_hivemind else "the rendezvous is"

    def _tell(self, event: Event) -> None:
        note = self._recorder.note
        match event:
            case Joined():
                log.info("outer joined standing=%s turn=%d", event.standing, event.turn)
            case Committed():
                for name, why in event.refused.items():
                    note(f"turn {event.turn}: {name} was refused: {why}")
            case Behind():
                note(f"this cluster takes the weights of another: {event.why}")
            case Reset():
                note(f"this cluster goes back to the last average: {event.why}")
            case RendezvousLost():
                meanwhile = "training goes on" if self.is_joined else "this cluster waits"
                note(f"{self._they_are} away, {meanwhile}: {event.why}")
            case RendezvousFound():
                note(f"{self._they_are} back after {format_duration(event.away_s)}")
            case Refused():
                note(f"the rendezvous does not let this cluster in: {event.what}; {event.fix}")
            case Note(is_warning=True):
                note(event.text)
            case Note():
                log.info("outer %s", event.text)
            case Members():
                log.info("outer clusters=%s", ",".join(event.names))
            case _:
                pass  # what follows tells

    def _capped(self, step: int) -> int:
        return step if self._total_steps is None else min(step, self._total_steps)


def schedule_of(config: DiLoCoConfig, num_fragments: int) -> Schedule | None:
    """When turns are due; None with `sync_every: auto`."""
    every = config.sync_every
    if every == "auto":
        return None
    return Schedule(every, num_fragments, config.warmup_rounds, config.warmup_sync_every or every)


def _finite(value: object) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None

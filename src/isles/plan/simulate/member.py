"""A cluster as the simulation has it, or several that are equal in everything: one `Member`.

A fleet of thousands has few different clusters: those of a group that nothing has befallen do all
at the same time. One that fails, leaves or is cut off becomes a member of its own, and counts with
the others again once it has taken part in an average and is as far as they are.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from isles.plan.simulate.fleet import GroupConfig
from isles.plan.simulate.line import Flow
from isles.plan.simulate.setting import Costs, Setting

State = Literal["compute", "outer", "wait", "down", "joining", "queue", "away", "done"]
"""compute: inner steps. outer: the outer step's own work, which inner steps wait for. wait: for an
average. down: failed, cut off or frozen. joining: takes the state, or averages it has missed.
queue: a job that waits. away: not there (yet). done: at the end of the run."""

Cause = Literal["compute", "outer", "others", "transfer", "down", "joining", "queue", "away"]
"""As `State`; a wait is either for others that still compute, or for links and hub."""

_SPANS = 4000


@dataclass(slots=True)
class Sent:
    """A contribution that no average has answered yet.

    Args:
        pos: inner steps at which it was made.
        inner: inner steps in it.
        at: when.
        is_counted: the hub has it, and measured it.
    """

    pos: int
    inner: float
    at: float
    is_counted: bool = False


@dataclass(slots=True)
class Made:
    """A contribution of the past, by which a restart finds what was learnt and kept."""

    outer_step: int
    pos: int
    is_counted: bool = False


@dataclass(slots=True)
class Machine:
    """Cores that several clusters share."""

    cores: int
    members: list[Member] = field(default_factory=list)


@dataclass(slots=True)
class GroupState:
    """A group of the fleet: its settings, members and counts; times are of all its clusters."""

    config: GroupConfig
    step_s: float
    up: float
    """Bytes/s of one cluster's uploads, all limits but the hub's line considered."""
    down: float
    costs: Costs
    """Of its cores."""
    members: list[Member] = field(default_factory=list)
    seconds: dict[Cause, float] = field(default_factory=dict)
    steps_done: float = 0.0
    steps_averaged: float = 0.0
    steps_lost: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    num_failures: int = 0
    late: int = 0
    """Contributions that came after their round."""
    stale_steps: float = 0.0
    """Inner steps between a contribution and its average, all added up."""
    most_stale: int = 0
    num_applied: int = 0

    def add(self, cause: Cause, seconds: float) -> None:
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds


class Member:
    """`count` equal clusters. Fields are the engine's to change.

    `pos` inner steps are done at `at`, as a number with a part of the step that is under way.
    """

    def __init__(self, group: GroupState, count: int, num_fragments: int) -> None:
        self.group, self.count = group, count
        self.machine: Machine | None = None
        self.state: State = "away"
        self.since = 0.0
        self.pos, self.at, self.rate = 0.0, 0.0, 1.0 / group.step_s
        self.skip = 0
        """The run's step counter is so far ahead of this cluster's own steps."""
        self.version = self.delivered = 0
        """Averages applied, and averages that lie here."""
        self.sent: dict[int, Sent] = {}
        self.made: deque[Made] = deque(maxlen=4 * num_fragments + 16)
        self.applied_at: deque[tuple[int, int]] = deque(maxlen=4 * num_fragments + 16)
        """Outer steps, and the inner step after which each was applied."""
        self.base = [0.0] * num_fragments
        """Of each fragment the inner steps that are in averages or on their way."""
        self.contributed_at = 0
        self.waited: set[int] = set()
        self.own_past: set[int] = set()
        """Rounds that have a contribution made before a restart."""
        self.ready: dict[int, float] = {}
        """When each delivered average is decoded, and can be given to the weights."""
        self.apply_from = 0
        """An average that comes late is applied after this inner step."""
        self.closing_at: tuple[int, int] | None = None
        """A round that closes soon, and the step after which this cluster contributes to it."""
        self.wait_for: int | None = None
        self.wait_since = 0.0
        """When the contribution was made whose average it waits for."""
        self.from_round = 0
        self.is_living = self.is_behind = self.is_finished = self.finishing = False
        self.is_connected = True
        self.has_taken_part = True
        self.encoded_at: dict[int, float] = {}
        """Contributions that are not handed to the client yet, and when they are encoded."""
        self.to_send: list[int] = []
        self.is_sending = False
        self.sending: Flow | None = None
        self.fetching: Flow | None = None
        self.left_bytes: dict[str, float] = {}
        """What is left of transfers that were cut off."""
        self.stopped_in: State | None = None
        """What it did when it was frozen."""
        self.pending: dict[str, tuple[float, tuple[Any, ...]]] = {}
        """Events that are going to happen to it: when, and what else they say; see `Core.later`."""
        self.spans: deque[tuple[str, float, float]] | None = None

    def keep_spans(self) -> None:
        """Record what this member does, for the timeline."""
        self.spans = deque(maxlen=_SPANS)

    @property
    def steps(self) -> int:
        """Whole inner steps that are done."""
        return math.floor(self.pos + 1e-6)

    @property
    def next_outer_step(self) -> int:
        """To which outer step it contributes next; see `isles.outer.trainer.sync`."""
        found = max(self.version, max(self.sent, default=-1) + 1)
        while found in self.own_past:
            found += 1
        return found

    def has_learnt(self) -> bool:
        """Whether anything is in no contribution."""
        return any(base < self.steps for base in self.base)

    def copy_of_one(self) -> Member:
        """One of these clusters, as it is now; transfers are the engine's."""
        one = Member(self.group, 1, len(self.base))
        for name, value in vars(self).items():
            if name not in ("count", "pending", "spans", "sending", "fetching"):
                copied = isinstance(value, dict | list | set | deque)
                setattr(one, name, value.copy() if copied else value)
        one.sent = {step: replace(each) for step, each in self.sent.items()}
        one.made = deque(map(replace, self.made), maxlen=self.made.maxlen)
        return one

    def checkpoint(self, setting: Setting, now: float) -> int:
        """Inner steps that are in the newest checkpoint."""
        steps = self.steps
        ages = [steps]
        if setting.save_every_steps is not None:
            ages.append((steps + self.skip) % setting.save_every_steps)
        if setting.save_every_s is not None:
            ages.append(math.floor(now % setting.save_every_s * self.rate))
        return steps - min(ages)

    def go_back(self, saved: int) -> float:
        """Its ranks were killed: go on from a checkpoint; returns the inner steps that are lost.

        What a counted contribution has is in the model, also where it is younger than the
        checkpoint; see `OuterStep.apply` of `isles.outer.trainer.step`. Lost is, of each fragment,
        what came after both.
        """
        now, lost = self.steps, 0.0
        fragments = len(self.base)
        for fragment in range(fragments):
            own = [made for made in self.made if made.outer_step % fragments == fragment]
            counted = [made.pos for made in own if made.is_counted]
            lost += now - max(saved, max(counted, default=0))
            before = max((made.pos for made in own if made.pos <= saved), default=0)
            self.base[fragment] = min(self.base[fragment], float(before))
            if any(pos > saved for pos in counted):
                self.base[fragment] = float(saved)
        self.own_past |= {made.outer_step for made in self.made if made.is_counted}
        self.sent = {t: sent for t, sent in self.sent.items() if sent.pos <= saved}
        self.own_past = {t for t in self.own_past if t >= self.version and t not in self.sent}
        self.to_send = [t for t in sorted(self.sent) if not self.sent[t].is_counted]
        self.made = deque((m for m in self.made if m.pos <= saved), maxlen=self.made.maxlen)
        late = [step for step, pos in self.applied_at if pos > saved]
        self.version = min([self.version, *late])
        self.applied_at = deque(
            (each for each in self.applied_at if each[1] <= saved), maxlen=self.applied_at.maxlen
        )
        self.contributed_at = max((made.pos for made in self.made), default=0)
        self.pos = float(saved)
        self.waited.clear()
        self.ready.clear()
        self.closing_at = self.wait_for = None
        return lost / fragments

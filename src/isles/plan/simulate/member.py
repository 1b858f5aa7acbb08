"""A simulated cluster, or several that are equal in every way: one `Member`.

A fleet of thousands has few different clusters, as the undisturbed clusters of a group do the same
at the same time. A cluster that fails, leaves or disconnects becomes a separate member. It is
merged again after it has taken part in an average and is as far as the others.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from isles.plan.simulate.fleet import GroupConfig
from isles.plan.simulate.line import Flow
from isles.plan.simulate.setting import Costs, SimulationSettings

State = Literal["compute", "outer", "wait", "down", "joining", "queue", "away", "done"]
"""compute: inner steps. outer: work of the outer step that inner steps wait for. wait: for an
average. down: failed, disconnected or frozen. joining: fetches the state or missed averages.
queue: a job that waits. away: absent or not yet present. done: at the end of the run."""

Cause = Literal["compute", "outer", "others", "transfer", "down", "joining", "queue", "away"]
"""A `State`, except that a wait is either for other clusters that compute, or for links and hub."""

_SPANS = 4000


@dataclass(slots=True)
class Sent:
    """A contribution that is in no average yet.

    Args:
        pos: inner steps of the cluster when it was made.
        inner: inner steps in it.
        at: time when it was made.
        is_counted: whether the hub has received and measured it.
    """

    pos: int
    inner: float
    at: float
    is_counted: bool = False


@dataclass(slots=True)
class PastContribution:
    """A past contribution. A restart uses it to find the training that is already averaged."""

    outer_step: int
    pos: int
    is_counted: bool = False


@dataclass(slots=True)
class SharedMachine:
    """A machine whose cores several clusters share."""

    cores: int
    members: list[Member] = field(default_factory=list)


@dataclass(slots=True)
class GroupState:
    """A group of the fleet: its settings, members and counts. Times are sums over its clusters."""

    config: GroupConfig
    step_s: float
    up: float
    """Bytes/s of one cluster's uploads, with all limits except the hub's link."""
    down: float
    costs: Costs
    """Costs of work on its cores."""
    members: list[Member] = field(default_factory=list)
    seconds: dict[Cause, float] = field(default_factory=dict)
    steps_done: float = 0.0
    steps_averaged: float = 0.0
    steps_lost: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    num_failures: int = 0
    late: int = 0
    """Contributions that arrived after their round."""
    stale_steps: float = 0.0
    """Sum over all contributions of the inner steps between a contribution and its average."""
    most_stale: int = 0
    num_applied: int = 0

    def add(self, cause: Cause, seconds: float) -> None:
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds


class Member:
    """`count` equal clusters. The engine changes the fields.

    `pos` inner steps are done at the time `at`, with the fraction of the current step.
    """

    def __init__(self, group: GroupState, count: int, num_fragments: int) -> None:
        self.group, self.count = group, count
        self.machine: SharedMachine | None = None
        self.state: State = "away"
        self.since = 0.0
        self.pos, self.at, self.rate = 0.0, 0.0, 1.0 / group.step_s
        self.skip = 0
        """Difference between the run's step counter and this cluster's own steps."""
        self.version = self.delivered = 0
        """Averages that are applied, and averages that are downloaded."""
        self.sent: dict[int, Sent] = {}
        self.made: deque[PastContribution] = deque(maxlen=4 * num_fragments + 16)
        self.applied_at: deque[tuple[int, int]] = deque(maxlen=4 * num_fragments + 16)
        """Outer steps, and the inner step after which each was applied."""
        self.base = [0.0] * num_fragments
        """For each fragment, the inner steps that are in averages or in contributions."""
        self.contributed_at = 0
        self.waited: set[int] = set()
        self.own_past: set[int] = set()
        """Rounds with a contribution from before a restart."""
        self.ready: dict[int, float] = {}
        """Time when each delivered average is decoded and can be applied."""
        self.apply_from = 0
        """Inner step after which a late average is applied."""
        self.closing_at: tuple[int, int] | None = None
        """A round that closes soon, and the step after which this cluster contributes to it."""
        self.wait_for: int | None = None
        self.wait_since = 0.0
        """Time of the contribution whose average this cluster waits for."""
        self.from_round = 0
        self.is_living = self.is_behind = self.is_finished = self.finishing = False
        self.is_connected = True
        self.has_taken_part = True
        self.encoded_at: dict[int, float] = {}
        """Contributions that are not with the client yet, and the times when they are encoded."""
        self.to_send: list[int] = []
        self.is_sending = False
        self.sending: Flow | None = None
        self.fetching: Flow | None = None
        self.left_bytes: dict[str, float] = {}
        """Remaining bytes of interrupted transfers."""
        self.stopped_in: State | None = None
        """State when it was frozen."""
        self.pending: dict[str, tuple[float, tuple[Any, ...]]] = {}
        """Scheduled events of this member, with their times and arguments; see `Core.later`."""
        self.spans: deque[tuple[str, float, float]] | None = None

    def keep_spans(self) -> None:
        """Record this member's states for the timeline."""
        self.spans = deque(maxlen=_SPANS)

    @property
    def steps(self) -> int:
        """Completed inner steps, as a whole number."""
        return math.floor(self.pos + 1e-6)

    @property
    def next_outer_step(self) -> int:
        """Outer step of its next contribution; see `isles.outer.trainer.sync`."""
        found = max(self.version, max(self.sent, default=-1) + 1)
        while found in self.own_past:
            found += 1
        return found

    def has_learned(self) -> bool:
        """True if it has inner steps that are in no contribution."""
        return any(base < self.steps for base in self.base)

    def copy_of_one(self) -> Member:
        """A copy of one of these clusters in its present state, without transfers."""
        one = Member(self.group, 1, len(self.base))
        for name, value in vars(self).items():
            if name not in ("count", "pending", "spans", "sending", "fetching"):
                copied = isinstance(value, dict | list | set | deque)
                setattr(one, name, value.copy() if copied else value)
        one.sent = {step: replace(each) for step, each in self.sent.items()}
        one.made = deque(map(replace, self.made), maxlen=self.made.maxlen)
        return one

    def checkpoint(self, setting: SimulationSettings, now: float) -> int:
        """Inner steps in the newest checkpoint."""
        steps = self.steps
        ages = [steps]
        if setting.save_every_steps is not None:
            ages.append((steps + self.skip) % setting.save_every_steps)
        if setting.save_every_s is not None:
            ages.append(math.floor(now % setting.save_every_s * self.rate))
        return steps - min(ages)

    def go_back(self, saved: int) -> float:
        """Return to a checkpoint after its ranks were killed. Returns the lost inner steps.

        A counted contribution is in the model, even if it is younger than the checkpoint; see
        `OuterStep.apply` of `isles.outer.trainer.step`. For each fragment, the inner steps after
        both are lost.
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

"""Figures of a simulated run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from isles.plan.simulate.core import Core
from isles.plan.simulate.member import Cause, GroupState

PRESENT: tuple[Cause, ...] = ("compute", "outer", "others", "transfer", "down", "joining")
"""Causes that count as time with the cluster present."""


_SUMS = (
    *("steps_done", "steps_averaged", "steps_lost", "sent_bytes", "received_bytes"),
    *("num_failures", "late", "stale_steps", "num_applied"),
)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Figures of the clusters of a group, together.

    Args:
        shares: by cause, the share of the time while they are present. For queue and away, the
            share of all time.
    """

    name: str
    count: int
    step_s: float
    shares: dict[str, float]
    present_s: float
    steps_done: float
    steps_averaged: float
    steps_lost: float
    sent_bytes: float
    received_bytes: float
    num_failures: int
    late: int
    stale_steps: float
    most_stale: int
    num_applied: int

    @property
    def goodput(self) -> float:
        """Share of these clusters' compute that ends up in the model."""
        kept = 1.0 - self.steps_lost / self.steps_done if self.steps_done else 0.0
        return self.shares["compute"] * kept


@dataclass(frozen=True, slots=True)
class Span:
    """State of a cluster from `begin` to `end`, in seconds from the start."""

    state: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated run.

    Args:
        seconds: time from the start to the end.
        commits: time of each outer step's commit.
        outer_s: seconds of each outer step, from its first contribution to its average.
        marks: for a group and an inner step, the time of its end, and its seconds of computing.
    """

    num_clusters: int
    sync_every: int
    num_fragments: int
    seconds: float
    groups: tuple[GroupResult, ...]
    commits: tuple[float, ...]
    outer_s: tuple[float, ...]
    parts: tuple[int, ...]
    hub_received_bytes: float
    hub_sent_bytes: float
    hub_in_busy: float
    hub_out_busy: float
    hub_cpu_busy: float
    num_events: int
    marks: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    timeline: tuple[tuple[str, tuple[Span, ...]], ...] = ()

    def share(self, cause: str) -> float:
        """Share of all clusters' time with this cause, weighted by their speeds."""
        weight = sum(group.present_s / group.step_s for group in self.groups)
        if not weight:
            return 0.0
        parts = (g.shares.get(cause, 0.0) * g.present_s / g.step_s for g in self.groups)
        return sum(parts) / weight

    @property
    def goodput(self) -> float:
        """Share of the whole fleet's compute that ends up in the model, 0 to 1."""
        weight = sum(group.present_s / group.step_s for group in self.groups)
        if not weight:
            return 0.0
        return sum(g.goodput * g.present_s / g.step_s for g in self.groups) / weight

    @property
    def usual_outer_s(self) -> float:
        """Median seconds of an outer step."""
        return statistics.median(self.outer_s) if self.outer_s else 0.0

    @property
    def steps_per_round(self) -> float:
        """Mean inner steps of a cluster per round, which averages every fragment once.

        More than `sync_every` if averages take longer than `deadline`, as clusters train on.
        """
        steps = sum(group.steps_done for group in self.groups) / self.num_clusters
        return steps * self.num_fragments / len(self.commits) if self.commits else 0.0

    @property
    def stale_steps(self) -> float:
        """Mean inner steps between a contribution and its average."""
        applied = sum(group.num_applied for group in self.groups)
        return sum(group.stale_steps for group in self.groups) / applied if applied else 0.0

    def figures(self) -> dict[str, Any]:
        """Figures that `--json` prints."""
        total = {cause: round(self.share(cause), 4) for cause in (*PRESENT, "queue", "away")}
        return {
            "clusters": self.num_clusters,
            "sync_every": self.sync_every,
            "seconds": round(self.seconds, 3),
            "goodput": round(self.goodput, 4),
            "shares": total,
            "outer_steps": len(self.commits),
            "outer_step_s": round(self.usual_outer_s, 3),
            "steps_per_round": round(self.steps_per_round, 1),
            "stale_steps": round(self.stale_steps, 2),
            "most_stale_steps": max((group.most_stale for group in self.groups), default=0),
            "late": sum(group.late for group in self.groups),
            "failures": sum(group.num_failures for group in self.groups),
            "steps_lost": round(sum(group.steps_lost for group in self.groups), 1),
            "sent_bytes": round(sum(group.sent_bytes for group in self.groups)),
            "received_bytes": round(sum(group.received_bytes for group in self.groups)),
            "hub": {
                "received_bytes": round(self.hub_received_bytes),
                "sent_bytes": round(self.hub_sent_bytes),
                "downlink_busy": round(self.hub_in_busy, 4),
                "uplink_busy": round(self.hub_out_busy, 4),
                "cpu_busy": round(self.hub_cpu_busy, 4),
            },
            "groups": [
                {
                    "name": group.name,
                    "clusters": group.count,
                    "step_s": round(group.step_s, 9),
                    "goodput": round(group.goodput, 4),
                    "shares": {cause: round(part, 4) for cause, part in group.shares.items()},
                    "steps": round(group.steps_done, 1),
                    "failures": group.num_failures,
                }
                for group in self.groups
            ],
        }


def make_result(core: Core, groups: Sequence[GroupState]) -> Result:
    """The counts of the engine as a result, group by group."""
    by_name: dict[str, list[GroupState]] = {}
    for group in groups:
        by_name.setdefault(group.config.name, []).append(group)
    committed, now = core.hub.committed, core.now
    return Result(
        num_clusters=core.fleet.num_clusters,
        sync_every=core.setting.sync_every,
        num_fragments=core.setting.num_fragments,
        seconds=now,
        groups=tuple(_group_result(same) for same in by_name.values()),
        commits=tuple(each.at for each in committed),
        outer_s=tuple(each.at - each.first_begun for each in committed),
        parts=tuple(each.num_parts for each in committed),
        hub_received_bytes=core.line_in.total_bytes,
        hub_sent_bytes=core.line_out.total_bytes,
        hub_in_busy=core.line_in.busy_s / now if now else 0.0,
        hub_out_busy=core.line_out.busy_s / now if now else 0.0,
        hub_cpu_busy=core.hub.threads.busy_s / (now * core.hub.threads.number) if now else 0.0,
        num_events=core.num_events,
        marks=dict(core.marked),
        timeline=tuple(
            (
                group.config.name,
                tuple(Span(*span) for span in member.spans or ()),
            )
            for group in groups
            for member in group.members
            if member.spans is not None
        ),
    )


def _group_result(same: Sequence[GroupState]) -> GroupResult:
    # Groups with the same name differ in their speeds.
    seconds: dict[Cause, float] = {}
    for group in same:
        for cause, spent in group.seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
    present_s = sum(seconds.get(cause, 0.0) for cause in PRESENT)
    all_s = present_s + seconds.get("queue", 0.0) + seconds.get("away", 0.0)
    shares = {c: seconds.get(c, 0.0) / present_s if present_s else 0.0 for c in PRESENT}
    away: tuple[Cause, ...] = ("queue", "away")
    shares |= {c: seconds.get(c, 0.0) / all_s if all_s else 0.0 for c in away}
    sums: dict[str, Any] = {name: sum(getattr(group, name) for group in same) for name in _SUMS}
    return GroupResult(
        name=same[0].config.name,
        count=same[0].config.count,
        step_s=statistics.mean(group.step_s for group in same),
        shares={str(cause): part for cause, part in shares.items()},
        present_s=present_s,
        most_stale=max(group.most_stale for group in same),
        **sums,
    )

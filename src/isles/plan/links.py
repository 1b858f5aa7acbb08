"""Bytes and seconds of averaging between clusters, and how often to sync."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isles.config.sections.outer import DiLoCoConfig
from isles.plan.machines import Link, Machines
from isles.plan.simulate.sizes import average_bytes, contribution_bytes


@dataclass(frozen=True, slots=True)
class ClusterLine:
    """Transfers of one cluster in a round, which averages every weight once.

    Args:
        seconds: busy time of its uplink.
        steps_s: seconds of its inner steps until the next round. None: unknown.
    """

    cluster: str
    line: Link
    sent_bytes: int
    fetched_bytes: int
    seconds: float
    steps_s: float | None


@dataclass(frozen=True, slots=True)
class OuterPlan:
    """Averaging between clusters.

    Args:
        lines: transfers of each cluster.
        hub_in_bytes, hub_out_bytes: bytes per round on the hub's uplink.
        hub_s: seconds of these transfers, at the rate of the hub's uplink.
        round_s: seconds of a round's transfers, on the slowest uplink.
        sync_every: inner steps per round, as written or chosen.
        step_s: seconds of an inner step at the pace of the run. That is the pace of the slowest
            cluster if rounds wait for all, and otherwise of the fastest. None: unknown.
        least_sync_every: smallest value that keeps the sync within `max_overhead`.
        overhead: share of the inner steps' time that the sync takes. 0 if `delay` hides it.
        waits: whether a round waits for the slowest cluster.
    """

    codec: str
    trained: int
    lines: tuple[ClusterLine, ...]
    hub: Link
    hub_in_bytes: int
    hub_out_bytes: int
    hub_s: float
    round_s: float
    sync_every: int | None
    step_s: float | None
    max_overhead: float
    least_sync_every: int | None
    overhead: float | None
    waits: bool

    @property
    def slowest_s(self) -> float | None:
        """Seconds of the inner steps of a round on the slowest cluster. None: unknown."""
        seconds = [line.steps_s for line in self.lines]
        return None if None in seconds else max(s for s in seconds if s is not None)


def least_sync_every(round_s: float, step_s: float, max_overhead: float) -> int:
    """Fewest inner steps per round that keep averaging within this share of their time."""
    return max(1, math.ceil(round_s / (max_overhead * step_s)))


def outer_plan(
    diloco: DiLoCoConfig,
    trained: int,
    clusters: Sequence[Machines],
    hub: Link,
    steps_s: Sequence[float | None],
) -> OuterPlan:
    """The averaging of a run.

    Args:
        trained: count of numbers to average.
        clusters: clusters of the run file. If there is one, others join from elsewhere.
        hub: uplink of the hub.
        steps_s: seconds of an inner step of each cluster. None: unknown.
    """
    codec = diloco.codec_config
    number = max(2, len(clusters))
    known = [step for step in steps_s if step is not None]
    waits = diloco.wait == "all"
    step_s = (max if waits else min)(known) if len(known) == len(steps_s) else None
    sent = contribution_bytes(codec, trained)
    fetched = average_bytes(codec, trained, number)
    seconds_of = []
    for cluster in clusters:
        rate = cluster.line.bytes_per_s
        if diloco.max_bytes_per_s:
            rate = min(rate, diloco.max_bytes_per_s)
        seconds = (sent + fetched) / rate + 2 * cluster.line.latency_s * diloco.fragments
        seconds_of.append(seconds)
    hub_s = (number * sent + number * fetched) / hub.bytes_per_s
    round_s = max([hub_s, *seconds_of])
    least = least_sync_every(round_s, step_s, diloco.max_sync_overhead) if step_s else None
    every = least if diloco.sync_every == "auto" else diloco.sync_every
    lines = [
        ClusterLine(own.name, own.line, sent, fetched, s, step * every if step and every else None)
        for own, s, step in zip(clusters, seconds_of, steps_s, strict=True)
    ]
    overhead = None
    if step_s and every:
        apart = every // diloco.fragments
        delay = apart // 2 if diloco.delay == "auto" else diloco.delay
        hidden = delay * step_s * diloco.fragments
        overhead = max(0.0, round_s - hidden) / (every * step_s)
    return OuterPlan(
        codec=diloco.codec_text,
        trained=trained,
        lines=tuple(lines),
        hub=hub,
        hub_in_bytes=number * sent,
        hub_out_bytes=number * fetched,
        hub_s=hub_s,
        round_s=round_s,
        sync_every=every,
        step_s=step_s,
        max_overhead=diloco.max_sync_overhead,
        least_sync_every=least,
        overhead=overhead,
        waits=waits,
    )

"""Bytes and seconds between clusters: an outer step, the hub's own line, and how often to sync."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isles.config.sections.outer import DiLoCoConfig
from isles.plan.machines import Link, Machines
from isles.plan.simulate.sizes import average_bytes, contribution_bytes


@dataclass(frozen=True, slots=True)
class ClusterLine:
    """One cluster in a round, in which every weight is averaged once.

    Args:
        seconds: that its line is busy.
        steps_s: of its inner steps until the next round; None: not known.
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
        lines: of the clusters.
        hub_in_bytes, hub_out_bytes: of the hub's own line in a round.
        hub_s: of it, at its rate.
        round_s: of a round, on the slowest of all lines.
        sync_every: inner steps of a round, as written or chosen.
        step_s: of an inner step at the pace of the run: of the slowest cluster where rounds wait
            for all, else of the fastest; None: not known.
        least_sync_every: the smallest with which the sync takes at most `max_overhead`.
        overhead: part of the inner steps' time that it takes as written; 0 where `delay` hides it.
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
        """Inner steps of a round on the slowest cluster; None: not known."""
        seconds = [line.steps_s for line in self.lines]
        return None if None in seconds else max(s for s in seconds if s is not None)


def least_sync_every(round_s: float, step_s: float, max_overhead: float) -> int:
    """Inner steps such that averaging takes at most a part of their time."""
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
        trained: numbers that are averaged.
        clusters: those of the run file; with one, others join it from elsewhere.
        hub: the hub's own line.
        steps_s: an inner step of each cluster; None: not known.
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
        hidden = diloco.delay * step_s * diloco.fragments
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

"""Capacity of one hub in clusters, its limits, and the effect of a second level of hubs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from isles.plan.simulate.engine import settled, step_seconds
from isles.plan.simulate.fleet import FleetConfig
from isles.plan.simulate.setting import (
    HEARTBEAT_S,
    HUB_GIVES,
    HUB_TAKES,
    NUMBER_THREADS,
    ON_THE_WIRE,
    SimulationSettings,
)

MOST_MEMBERS = 4096
"""`max_clusters` of `isles.outer.hub.rules.Settings` is 64 by default, and at most this."""
_BEAT_S, _BEAT_MEMBER_S = 80e-6, 9e-6
"""Seconds of the hub's journal thread per heartbeat, and in addition per member, as the reply lists
all names; see docs/benchmarks.md."""
_MOMENT_S = 0.25
"""Delay of a cluster's heartbeats after the time for them (client/session.py)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of a hub.

    Args:
        clusters: most clusters within this limit.
        what: part of the hub that is full.
    """

    clusters: int
    what: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """Clusters that one hub, and two levels of hubs, can serve for a fleet.

    Args:
        limits: limits of one hub, the lowest first.
        two_levels: most clusters with two levels: as many hubs as one root can serve, each with
            the same number of clusters. isles has no second level yet.
        hubs: hubs of a second level for this fleet. 1: none needed.
        root_s: seconds that a second level adds to an outer step.
        disk_bytes: contributions of one outer step on the hub's disk.
    """

    limits: tuple[Limit, ...]
    hubs: int
    two_levels: int
    root_s: float
    disk_bytes: int

    @property
    def first(self) -> Limit:
        return self.limits[0]


def capacity(fleet: FleetConfig, setting: SimulationSettings) -> Capacity:
    """Capacity of a hub for clusters like the fleet's, in the same proportions.

    The hub can serve them if each of its parts needs less time per round (every fragment once)
    than the clusters compute per round.
    """
    one = fleet.model_copy(update={"hub": fleet.hub.model_copy(update={"hubs": 1})})
    setting = settled(one, setting)
    hub, costs = fleet.hub, setting.costs.scaled(fleet.hub.cpu)
    round_s = setting.sync_every * max(step_seconds(g, setting) for g in fleet.clusters)
    fragments = range(setting.num_fragments)
    sent = ON_THE_WIRE * sum(setting.contribution_bytes(fragment) for fragment in fragments)
    numbers = setting.parameters

    def fetched(parts: int) -> float:
        return ON_THE_WIRE * sum(setting.average_bytes(fragment, parts) for fragment in fragments)

    def most_fetched(rate: float) -> int:
        if setting.codec.kind != "topk":  # its average grows with the clusters
            return int(rate * round_s / fetched(1))
        return int(math.sqrt(rate * round_s / fetched(1)))

    number_s = numbers / costs.measure + numbers / costs.average
    beats = hub.cpu * (min(HEARTBEAT_S, setting.dead_after_s / 4) + _MOMENT_S)
    root = (_BEAT_S**2 + 4 * _BEAT_MEMBER_S * beats) ** 0.5
    found = [
        Limit(int(hub.downlink * round_s / sent), "its downlink"),
        Limit(most_fetched(hub.uplink), "its uplink"),
        Limit(int(HUB_TAKES * hub.cpu * round_s / sent), "its process, receiving contributions"),
        Limit(most_fetched(HUB_GIVES * hub.cpu), "its process, sending averages"),
        Limit(int(NUMBER_THREADS * round_s / number_s), "its threads, measuring and averaging"),
        Limit(int((root - _BEAT_S) / (2 * _BEAT_MEMBER_S)), "its journal, answering heartbeats"),
        Limit(MOST_MEMBERS, "the largest max_clusters"),
    ]
    limits = tuple(sorted(found, key=lambda limit: limit.clusters))
    most = max(1, limits[0].clusters)
    num = fleet.num_clusters
    # The root and each hub have the same number of clients: the square root of all clusters.
    hubs = 1 if num <= most else max(-(-num // most), math.ceil(math.sqrt(num)))
    return Capacity(
        limits=limits,
        hubs=hubs,
        two_levels=most * most,
        root_s=_root_s(fleet, setting, hubs),
        disk_bytes=num * max(map(setting.contribution_bytes, fragments)),
    )


def with_hubs(fleet: FleetConfig, hubs: int) -> FleetConfig:
    """The fleet with a second level of hubs, which isles does not have yet."""
    return fleet.model_copy(update={"hub": fleet.hub.model_copy(update={"hubs": hubs})})


def _root_s(fleet: FleetConfig, setting: SimulationSettings, hubs: int) -> float:
    # Time of a fragment from the hubs to the root and back, with averaging at the root.
    if hubs < 2:
        return 0.0
    largest = max(range(setting.num_fragments), key=setting.fragments.__getitem__)
    sent = ON_THE_WIRE * setting.contribution_bytes(largest)
    received = ON_THE_WIRE * setting.average_bytes(largest, fleet.num_clusters)
    costs = setting.costs.scaled(fleet.hub.cpu)
    average_s = hubs * setting.fragments[largest] / costs.average
    up_s = max(hubs * sent / fleet.hub.downlink, sent / fleet.hub.uplink)
    down_s = max(hubs * received / fleet.hub.uplink, received / fleet.hub.downlink)
    return up_s + average_s + down_s


def without_chance(fleet: FleetConfig) -> FleetConfig:
    """The fleet without random events and incidents."""
    nothing = {"joins": None, "leaves": None, "failures": None, "time_limit": None}
    groups = tuple(
        group.model_copy(update={**nothing, "queue_wait": None}) for group in fleet.clusters
    )
    return fleet.model_copy(update={"clusters": groups, "incidents": ()})


def without_end(setting: SimulationSettings) -> SimulationSettings:
    """The run without its end, for figures of its middle."""
    return replace(setting, max_steps=None)

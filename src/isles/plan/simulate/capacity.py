"""How many clusters one hub carries, what ends it, and what a second level of hubs would bring."""

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
    Setting,
)

MOST_MEMBERS = 4096
"""`max_clusters` of `isles.outer.hub.rules.Settings` is 64, and this at most."""
_BEAT_S, _BEAT_MEMBER_S = 80e-6, 9e-6
"""Seconds of the hub's journal thread for one heartbeat, and besides for each member, whose name
stands in the answer; see docs/benchmarks.md."""
_MOMENT_S = 0.25
"""A cluster sends its next heartbeat so long after the time for it (client/session.py)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What ends a hub.

    Args:
        clusters: so many it carries.
        what: of the hub is full then.
    """

    clusters: int
    what: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one hub, and two levels of hubs, carry of a fleet's clusters.

    Args:
        limits: of one hub, the first that is met before the others.
        two_levels: clusters of as many hubs as one root carries, each with as many clusters; on
            paper, as isles has no second level.
        hubs: of a second level for this fleet; 1: it needs none.
        root_s: what they add to an outer step.
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


def capacity(fleet: FleetConfig, setting: Setting) -> Capacity:
    """What a hub carries where its clusters are those of the fleet, in the same proportions.

    It carries them as long as each of its parts needs less time for a round (every fragment once)
    than the clusters compute for it.
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
        Limit(int(HUB_TAKES * hub.cpu * round_s / sent), "its process, which takes contributions"),
        Limit(most_fetched(HUB_GIVES * hub.cpu), "its process, which gives averages"),
        Limit(int(NUMBER_THREADS * round_s / number_s), "its threads, which measure and average"),
        Limit(
            int((root - _BEAT_S) / (2 * _BEAT_MEMBER_S)), "its journal, which answers heartbeats"
        ),
        Limit(MOST_MEMBERS, "max_clusters, which can be no more"),
    ]
    limits = tuple(sorted(found, key=lambda limit: limit.clusters))
    most = max(1, limits[0].clusters)
    num = fleet.num_clusters
    # Of a root and its hubs none has more clients than the other: a square root of all clusters.
    hubs = 1 if num <= most else max(-(-num // most), math.ceil(math.sqrt(num)))
    return Capacity(
        limits=limits,
        hubs=hubs,
        two_levels=most * most,
        root_s=_root_s(fleet, setting, hubs),
        disk_bytes=num * max(map(setting.contribution_bytes, fragments)),
    )


def with_hubs(fleet: FleetConfig, hubs: int) -> FleetConfig:
    """The fleet with a second level of hubs, on paper."""
    return fleet.model_copy(update={"hub": fleet.hub.model_copy(update={"hubs": hubs})})


def _root_s(fleet: FleetConfig, setting: Setting, hubs: int) -> float:
    # The way of a fragment from the hubs to the root and back, with the root's averaging.
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
    """The fleet as it is where all goes well."""
    nothing = {"joins": None, "leaves": None, "failures": None, "time_limit": None}
    groups = tuple(
        group.model_copy(update={**nothing, "queue_wait": None}) for group in fleet.clusters
    )
    return fleet.model_copy(update={"clusters": groups, "incidents": ()})


def without_end(setting: Setting) -> Setting:
    """The run as it is in its middle."""
    return replace(setting, max_steps=None)

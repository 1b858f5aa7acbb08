"""The fleet file: clusters with speeds and links, their hub, and their failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo

from isles.config.explain import explain
from isles.config.issues import Issue, quote
from isles.config.load import Loaded, placed
from isles.config.sections.base import DurationS, Section, Text, own_type
from isles.config.sections.cluster import PbsLauncherConfig, SlurmLauncherConfig, SshLauncherConfig
from isles.config.yaml import dotted, read_text, scan_yaml
from isles.errors import ConfigErrors
from isles.facts.gpus import find_gpu
from isles.plan.simulate.setting import SimulationSettings

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(bit|B)(?:/s)?")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kMBT]?)")
_LOOPBACK = {"uplink": 1.25e9, "downlink": 1.25e9, "latency": 1e-4}
"""Links of clusters on one machine."""
ASSUMED_GPU, ASSUMED_MFU = "RTX 4090", 0.4
"""Assumed GPU of the run file's clusters, and its MFU, if no fleet file has their speed."""


def _rate(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and info.context:  # in a file; Python code has bytes/s
            raise ValueError("a rate needs a unit: write 100Mbit/s, or 12MB/s")
        return value
    found = _RATE.fullmatch(value.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError("not a valid rate: write 100Mbit/s, or 12MB/s")
    scale = 1000.0 ** " kMGT".index(found[2] or " ")
    return float(found[1]) * scale / (8.0 if found[3] == "bit" else 1.0)


def _count(value: object) -> object:
    if not isinstance(value, str):
        return value
    found = _COUNT.fullmatch(value.strip())
    if found is None:
        raise ValueError("not a valid number: write 7000000000, or 7B")
    return round(float(found[1]) * 1000.0 ** " kMBT".index(found[2] or " "))


Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0), own_type("line", "100Mbit/s")]
"""Bytes/s, written as `100Mbit/s` or `12MB/s`."""
Count = Annotated[int, BeforeValidator(_count), Field(ge=1), own_type("count", "7B")]
Positive = Annotated[DurationS, Field(gt=0)]


class FailuresConfig(Section):
    """Random failures, independent for each cluster."""

    every: Positive
    """Mean time between two failures of one cluster, such as 2d."""

    lasts: Positive = 60.0
    """Time until the ranks start again from their last checkpoint."""


class LeavesConfig(Section):
    """Absences of a cluster, which saves a checkpoint before it leaves."""

    every: Positive
    """Mean time between two absences, such as 10h."""

    away: Positive
    """Mean time of an absence."""


class HubConfig(Section):
    """The hub and its link."""

    uplink: Rate = 125e6
    """Upload rate of the hub, for averages. Default: 1Gbit/s."""

    downlink: Rate = 125e6
    """Download rate of the hub, for contributions. Default: 1Gbit/s."""

    cpu: Annotated[float, Field(gt=0)] = 1.0
    """Speed of one of its cores, relative to the core of docs/benchmarks.md."""


class GroupConfig(Section):
    """A group of equal clusters."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Short name for the tables."""

    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of clusters."""

    step: Positive | None = None
    """Time of one inner step. Set either step or tokens_per_s."""

    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    """Tokens per second of one cluster, as `isles status` prints them."""

    spread: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Relative standard deviation of the clusters' speeds, such as 0.05."""

    uplink: Rate = 12.5e6
    """Upload rate of a cluster's link. Default: 100Mbit/s."""

    downlink: Rate = 12.5e6
    """Download rate of a cluster's link. Default: 100Mbit/s."""

    latency: Annotated[DurationS, Field(ge=0)] = 0.02
    """Latency from a cluster to the hub, one way."""

    cpu: Annotated[float, Field(gt=0)] = 1.0
    """Speed of a core that encodes and applies, relative to the core of docs/benchmarks.md."""

    joins: Positive | None = None
    """Mean time until a cluster joins. Default: all clusters join at the start."""

    leaves: LeavesConfig | None = None
    """Random absences of a cluster. Default: none."""

    failures: FailuresConfig | None = None
    """Random failures of a cluster. Default: none."""

    time_limit: Positive | None = None
    """Time limit of a job in a queue, which saves a checkpoint and ends. Default: no limit."""

    queue_wait: Positive | None = None
    """Mean wait in the queue until the job continues. Used with time_limit."""

    machine: Text | None = None
    """A name in `machines`, for tests on one machine. The clusters of one machine share its cores,
    so a step takes longer while others compute. Default: each cluster has its own cores."""

    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Cores that a step uses. Used with machine."""


class IncidentConfig(Section):
    """One planned incident."""

    cluster: Text | None = None
    """Group whose first cluster has the incident. Default: the hub."""

    kind: Literal["killed", "cut", "frozen", "stuck", "hub"]
    """killed: its ranks die, and start again from their checkpoint. cut: its link is down, while it
    trains. frozen: neither link nor steps. stuck: heartbeats without steps. hub: the hub is
    down."""

    at: Annotated[DurationS, Field(ge=0)] | None = None
    """Time of the incident. Set either at or round."""

    round: Annotated[int, Field(ge=0)] | None = None
    """The incident starts after every fragment of this round is averaged."""

    after: Annotated[DurationS, Field(ge=0)] = 0.0
    """Delay after the round. Used with round."""

    lasts: Positive
    """Duration of the incident."""


class FleetConfig(Section):
    """A fleet file."""

    parameters: Count | None = None
    """Trained parameters, such as 7B, instead of the run file's model."""

    hub: HubConfig = HubConfig()
    """The hub that averages."""

    clusters: Annotated[tuple[GroupConfig, ...], Field(strict=False, min_length=1)]
    """Groups of equal clusters."""

    machines: dict[str, Annotated[int, Field(ge=1)]] = Field(default={})
    """Cores of machines that several clusters share, by name."""

    incidents: Annotated[tuple[IncidentConfig, ...], Field(strict=False)] = ()
    """Planned incidents, in addition to random failures."""

    @property
    def num_clusters(self) -> int:
        return sum(group.count for group in self.clusters)


def load_fleet(path: Path) -> FleetConfig:
    """Read a fleet file.

    Raises:
        ConfigErrors: every issue, each with file, line and key.
    """
    text = read_text(path, "fleet file", "check the path; docs/simulate.md has the keys")
    document, errors = scan_yaml(text, str(path))
    try:
        fleet = FleetConfig.model_validate(document.value, context={"is_run_file": True})
        issues = list(_rules(fleet))
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        issues = explain(details, document.value, FleetConfig)
    places = {dotted(at): f"{path}:{line}" for at, line in document.lines.items()}
    errors += [error for _, error in placed(issues, places, f"{path}:1")]
    if errors:
        raise ConfigErrors(errors)
    return fleet


def _rules(fleet: FleetConfig) -> Iterator[Issue]:
    names, machines = [group.name for group in fleet.clusters], list(fleet.machines)
    for index, group in enumerate(fleet.clusters):
        at = f"clusters.{index}"
        if names.index(group.name) < index:
            yield Issue((f"{at}.name",), f"two groups have the name {group.name}", "rename one")
        if (group.step is None) == (group.tokens_per_s is None):
            yield Issue((at,), "a group needs either step or tokens_per_s", "set one of them")
        if (group.time_limit is None) != (group.queue_wait is None):
            yield Issue((at,), "time_limit and queue_wait need each other", "set both or none")
        if group.machine is not None and group.machine not in machines:
            yield _unknown(f"{at}.machine", "machine", group.machine, machines)
    for index, incident in enumerate(fleet.incidents):
        at = f"incidents.{index}"
        if (incident.at is None) == (incident.round is None):
            yield Issue((at,), "an incident needs either at or round", "set one of them")
        if (incident.cluster is None) != (incident.kind == "hub"):
            what = "an incident of kind hub has no cluster, and every other kind needs one"
            yield Issue((f"{at}.cluster", at), what, f"use one of {', '.join(names)}, or kind: hub")
        elif incident.cluster is not None and incident.cluster not in names:
            yield _unknown(f"{at}.cluster", "cluster", incident.cluster, names)


def _unknown(key: str, noun: str, name: str, known: list[str]) -> Issue:
    fix = f"use one of {', '.join(known)}" if known else f"add it to {noun}s"
    return Issue((key,), f"{noun} {quote(name)} not found", fix)


@dataclass(frozen=True, slots=True)
class Planned:
    """Plan of a cluster by `isles plan`.

    Args:
        step_s: seconds of an inner step. None: unknown.
        by: source of this time.
        bytes_per_s, latency_s: rate and latency of its uplink to the hub. None: unknown.
    """

    step_s: float | None
    by: str
    bytes_per_s: float | None = None
    latency_s: float | None = None


def fleet_of(
    loaded: Loaded, setting: SimulationSettings, planned: Mapping[str, Planned] | None = None
) -> tuple[FleetConfig, list[str]]:
    """The clusters of a run file as a fleet, and the assumptions about them.

    Args:
        planned: plans of clusters by `isles plan`, by name.
    """
    gpu = find_gpu(ASSUMED_GPU)
    assert gpu is not None
    speed = gpu.bf16_flops * ASSUMED_MFU
    groups, waits, assumed, unlinked = [], False, list[str](), False
    notes = list[str]()
    for cluster in loaded.config.clusters:
        launcher = cluster.launcher
        nodes = cluster.nodes if isinstance(cluster.nodes, int) else 1
        if cluster.nodes == "auto" and isinstance(launcher, SshLauncherConfig):
            nodes = len(launcher.hosts)
        per_node = cluster.gpus_per_node if isinstance(cluster.gpus_per_node, int) else 1
        flops_per_step = setting.flops_per_token * setting.tokens_per_step
        limit = None
        if isinstance(launcher, SlurmLauncherConfig | PbsLauncherConfig) and launcher.requeue:
            limit = launcher.time
        waits = waits or limit is not None
        known = (planned or {}).get(cluster.name)
        if known is not None and known.step_s:
            step_s = known.step_s
            notes.append(
                f"a step of {cluster.name or 'the cluster'} takes {step_s:.3g} s: {known.by}"
            )
        else:
            step_s = flops_per_step / (speed * nodes * per_node)
            assumed.append(cluster.name)
        links: dict[str, Any] = dict(_LOOPBACK) if cluster.is_here else {}
        if known is not None and known.bytes_per_s is not None:
            links |= dict.fromkeys(("uplink", "downlink"), known.bytes_per_s)
            links |= {"latency": known.latency_s} if known.latency_s is not None else {}
        unlinked = unlinked or not links
        groups.append(
            GroupConfig(
                name=cluster.name,
                step=step_s,
                time_limit=limit,
                queue_wait=None if limit is None else 3600.0,
                **links,
            )
        )
    if assumed:
        which = "" if len(assumed) == len(groups) else f" of {', '.join(assumed)}"
        card = f"{speed / 1e12:.0f} TFLOP/s ({ASSUMED_MFU:.0%} of an {ASSUMED_GPU})"
        notes.append(f"each GPU{which} computes {card}")
    if unlinked:
        notes.append(
            "each cluster and the hub have the default links of a fleet file: 100 Mbit/s each "
            "way and 20 ms, the hub 1 Gbit/s"
        )
    notes += ["a job waits an hour in the queue"] if waits else []
    if all(cluster.is_here for cluster in loaded.config.clusters):
        hub = HubConfig(uplink=_LOOPBACK["uplink"], downlink=_LOOPBACK["downlink"])
        return FleetConfig(clusters=tuple(groups), hub=hub), notes
    return FleetConfig(clusters=tuple(groups)), notes

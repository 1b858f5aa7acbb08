"""Resources that each node of a run requests from Ray, and nodes of a cluster that can provide
them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isles.launch.ssh.environment import network_variables, python_of, setting_lines

if TYPE_CHECKING:  # the driver uses this file without the config classes, which are slow to import
    from isles.config.sections.cluster import ClusterConfig, RayBundleConfig


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of a Ray cluster, with all its resources, free or not."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RayRequest:
    """The driver's request to Ray, and the command for each node; stored in `launch.json`.

    Args:
        bundles: the resources of each node, in the form of Ray's placement groups.
        labels: labels that each node must have.
        ranks: number of ranks of each node.
        port: first port that the coordinator tries.
        script: lines of bash that run an agent, which reads its arguments from standard input.
        environ: additional environment variables of the agent.
    """

    bundles: Sequence[Mapping[str, float]]
    labels: Sequence[Mapping[str, str]]
    ranks: Sequence[int]
    min_nodes: int
    start_timeout_s: float
    port: int
    device: str
    script: str
    environ: Mapping[str, str]

    @classmethod
    def of(cls, cluster: ClusterConfig, workdir: str) -> RayRequest:
        """The request of a run file; `workdir`: working folder of the ranks on the nodes."""
        device = "cpu" if cluster.device == "cpu" else "cuda"
        python = shlex.quote(python_of(cluster.environment))
        # Only the agent may read its standard input.
        first, agent = "exec 3<&0 </dev/null", f"exec {python} -m isles.agent - <&3 3<&-"
        return cls(
            bundles=bundles(cluster),
            labels=label_selectors(cluster),
            ranks=ranks_of(cluster),
            min_nodes=cluster.min_nodes,
            start_timeout_s=cluster.start_timeout,
            port=cluster.network.port,
            device=device,
            script="\n".join([first, *setting_lines(cluster, workdir), agent]),
            environ=network_variables(cluster.network, None, device),
        )


def ranks_of(cluster: ClusterConfig) -> tuple[int, ...]:
    """The ranks of each node."""
    assert isinstance(cluster.gpus_per_node, int), "a config rule guarantees it"
    return tuple(bundle.gpus or cluster.gpus_per_node for bundle in _sections(cluster))


def bundles(cluster: ClusterConfig) -> list[dict[str, float]]:
    """The resources of each node, in the form of Ray's placement groups."""
    found = []
    for bundle, ranks in zip(_sections(cluster), ranks_of(cluster), strict=True):
        gpus = {} if cluster.device == "cpu" else {"GPU": float(ranks)}
        found.append({**gpus, "CPU": float(ranks), **bundle.resources})
    return found


def label_selectors(cluster: ClusterConfig) -> list[dict[str, str]]:
    """The labels that each node must have."""
    return [dict(bundle.label_selector) for bundle in _sections(cluster)]


def _sections(cluster: ClusterConfig) -> tuple[RayBundleConfig, ...]:
    from isles.config.sections.cluster import RayBundleConfig, RayLauncherConfig

    assert isinstance(cluster.launcher, RayLauncherConfig)
    given = cluster.launcher.bundles or (RayBundleConfig(),)
    return given if len(given) > 1 else given * cluster.max_nodes


def match_nodes(
    bundles: Sequence[Mapping[str, float]],
    labels: Sequence[Mapping[str, str]],
    nodes: Sequence[RayNode],
) -> dict[int, RayNode]:
    """Assign as many bundles as possible to different nodes; returns the node of each assigned
    bundle.

    Args:
        labels: labels that the node of each bundle must have; a selector that is not a plain value
            counts as met.
    """
    owner: dict[int, int] = {}

    def fits(number: int, node: RayNode) -> bool:
        plain = {key: value for key, value in labels[number].items() if not set("!(") & set(value)}
        has_all = all(
            node.resources.get(name, 0.0) >= amount for name, amount in bundles[number].items()
        )
        return has_all and all(node.labels.get(key) == value for key, value in plain.items())

    def place(number: int, tried: set[int]) -> bool:
        for index, node in enumerate(nodes):
            if index in tried or not fits(number, node):
                continue
            tried.add(index)
            if index not in owner or place(owner[index], tried):
                owner[index] = number
                return True
        return False

    for number in range(len(bundles)):
        place(number, set())
    return {number: nodes[index] for index, number in owner.items()}


def lacking(
    bundles: Sequence[Mapping[str, float]],
    labels: Sequence[Mapping[str, str]],
    fitting: Mapping[int, object],
) -> str:
    """Text about the bundles that have no node."""
    missing = [number for number in range(len(bundles)) if number not in fitting]
    wanted = "; ".join(
        f"node {n} needs {amounts_text(bundles[n])}"
        + "".join(f", {key}={value}" for key, value in labels[n].items())
        for n in missing
    )
    return f"Ray has no node for {len(missing)} of {len(bundles)}: {wanted}"


def nodes_text(nodes: Sequence[RayNode]) -> str:
    """Text about the resources of the nodes."""
    return "; ".join(f"{node.name} has {amounts_text(node.resources)}" for node in nodes)


def amounts_text(amounts: Mapping[str, float]) -> str:
    """Text about resources, such as `CPU 8, GPU 2`; without resources that Ray derives
    from nodes."""
    shown = {k: v for k, v in amounts.items() if ":" not in k and k != "object_store_memory"}
    gib = {k: f"{v / 2**30:.0f} GiB" for k, v in shown.items() if k == "memory"}
    return ", ".join(f"{key} {gib.get(key, f'{value:g}')}" for key, value in sorted(shown.items()))

"""The rules inside a cluster: its launcher, nodes, environment and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from isles.config.issues import Issue
from isles.config.sections.cluster import (
    ClusterConfig,
    EnvironmentConfig,
    ManualLauncherConfig,
    QueueSection,
    RayLauncherConfig,
    SkypilotLauncherConfig,
    SlurmLauncherConfig,
    SshLauncherConfig,
)
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.config.sections.run import RunConfig


def cluster_rules(config: RunConfig) -> Iterator[Issue]:
    """Every broken rule within a cluster."""
    for index, cluster in enumerate(config.clusters):
        key = f"clusters.{index}"
        yield from _host_rules(cluster, key)
        yield from _environment_rules(cluster, key)
        yield from _queue_rules(cluster, key)
        if isinstance(cluster.launcher, SkypilotLauncherConfig):
            yield from _skypilot_rules(cluster, cluster.launcher, key)
        yield from _pod_rules(config, cluster, key)


def _host_rules(cluster: ClusterConfig, key: str) -> Iterator[Issue]:
    if cluster.nodes != "auto" and cluster.hosts and cluster.max_nodes != len(cluster.hosts):
        num = len(cluster.hosts)
        yield Issue(
            (f"{key}.nodes", f"{key}.launcher.hosts"),
            f"nodes {cluster.nodes} does not match the list of {num} hosts",
            f"delete it, or use {num}, or MIN:{num}",
        )
    bundles = cluster.launcher.bundles if isinstance(cluster.launcher, RayLauncherConfig) else ()
    if len(bundles) > 1 and cluster.max_nodes != len(bundles):
        yield Issue(
            (f"{key}.nodes", f"{key}.launcher.bundles"),
            f"nodes {cluster.nodes} does not match the list of {len(bundles)} bundles",
            f"delete it, or use {len(bundles)}, or MIN:{len(bundles)}; or keep one bundle for all",
        )
    counts = Counter(host.ssh for host in cluster.hosts)
    counts.update(h.address for h in cluster.hosts if h.address not in (None, h.ssh))
    for name in (name for name, count in counts.items() if count > 1):
        yield Issue(
            (f"{key}.launcher.hosts",),
            f"the host {name} is listed twice",
            "list each host once, and set its number of ranks with gpus",
        )


def _environment_rules(cluster: ClusterConfig, key: str) -> Iterator[Issue]:
    environment = cluster.environment
    if environment.venv is not None and environment.conda is not None:
        yield Issue(
            (f"{key}.environment.conda", f"{key}.environment.venv"),
            f"venv {environment.venv} and conda {environment.conda} each give a Python",
            "keep one of them",
        )
    if environment.python is not None and environment.python.startswith("~"):
        yield Issue(
            (f"{key}.environment.python",),
            f"python {environment.python} begins with ~, which isles does not expand",
            "write the absolute path, or give the folder of its environment as venv",
        )
    yield from _container_rules(cluster, key)
    allowed = EnvironmentConfig(variables=environment.variables, container=environment.container)
    if cluster.is_here and environment != allowed:
        yield Issue(
            (f"{key}.environment",),
            "the ranks of this machine use the Python of isles",
            "keep only variables and container, and activate the right Python before `isles train`",
        )
    if cluster.workdir is not None and cluster.is_here:
        yield Issue(
            (f"{key}.workdir",),
            f"workdir {cluster.workdir} has no effect on this machine",
            "delete it, and call isles in that folder",
        )
    if cluster.sync is not None and not isinstance(cluster.launcher, SshLauncherConfig):
        yield Issue(
            (f"{key}.sync",),
            f"sync needs the launcher ssh, and the launcher is {cluster.launcher.kind}",
            "delete it",
        )


def _container_rules(cluster: ClusterConfig, key: str) -> Iterator[Issue]:
    container, launcher = cluster.environment.own_container, cluster.launcher
    if container is None:
        return
    where, in_job = f"{key}.environment.container", isinstance(launcher, QueueSection)
    if container.runtime == "pyxis" and not isinstance(launcher, SlurmLauncherConfig):
        yield Issue(
            (f"{where}.runtime", where),
            f"pyxis needs the launcher slurm, and the launcher is {launcher.kind}",
            "use apptainer, or podman with the launchers ssh and local",
        )
    if container.runtime == "podman" and in_job:
        yield Issue(
            (f"{where}.runtime", where),
            f"podman containers would keep running after the {launcher.kind} job ends",
            "use apptainer, or pyxis in Slurm",
        )
    if cluster.is_here and cluster.max_nodes > 1:
        yield Issue(
            (f"{key}.nodes", where),
            f"nodes {cluster.nodes} on this machine do not work with a container, which is one "
            "node",
            "delete nodes, and set the number of ranks with gpus_per_node",
        )


def _queue_rules(cluster: ClusterConfig, key: str) -> Iterator[Issue]:
    launcher = cluster.launcher
    time = launcher.time if isinstance(launcher, QueueSection) else None
    if isinstance(launcher, QueueSection) and time is not None and launcher.save_before >= time:
        yield Issue(
            (f"{key}.launcher.save_before", f"{key}.launcher.time"),
            f"save_before {launcher.save_before:.0f}s leaves no time for training within the time "
            f"limit of {time:.0f}s",
            "use a shorter save_before or a longer time",
        )
    if cluster.gpus_per_node == "auto" and isinstance(
        launcher,
        QueueSection
        | RayLauncherConfig
        | ManualLauncherConfig
        | SkypilotLauncherConfig
        | KubernetesLauncherConfig,
    ):
        yield Issue(
            (f"{key}.gpus_per_node", f"{key}.launcher", f"{key}"),
            f"this machine cannot count the GPUs of a {launcher.kind} node",
            "set gpus_per_node to the number of ranks on each node",
        )


def _skypilot_rules(
    cluster: ClusterConfig, launcher: SkypilotLauncherConfig, key: str
) -> Iterator[Issue]:
    at = f"{key}.launcher"
    if cluster.min_nodes < cluster.max_nodes:
        yield Issue(
            (f"{key}.nodes",),
            f"nodes {cluster.nodes} needs a job that continues with fewer nodes, and SkyPilot "
            "stops all nodes of a job with the first",
            f"use nodes: {cluster.max_nodes}",
        )
    for name in launcher.accelerators:
        if ":" in name:
            yield Issue(
                (f"{at}.accelerators",),
                f"{name} has a count, which belongs in gpus_per_node",
                f"write {name.partition(':')[0]}",
            )
    if launcher.accelerators and cluster.device == "cpu":
        yield Issue(
            (f"{at}.accelerators", f"{key}.device"),
            f"device is cpu, and accelerators requests {launcher.accelerators[0]}",
            "delete one of the two",
        )
    for other in ("accelerators", "any_of", "ordered"):
        if launcher.accelerators and other in launcher.resources:
            yield Issue(
                (f"{at}.resources.{other}", f"{at}.resources", f"{at}.accelerators"),
                f"accelerators and resources.{other} both select GPUs",
                "keep one of them",
            )
    if launcher.managed and launcher.cluster is not None:
        yield Issue(
            (f"{at}.cluster", f"{at}.managed"),
            "SkyPilot itself names the cluster of a managed job, and cluster is "
            f"{launcher.cluster}",
            "delete one of the two",
        )
    for name in launcher.resources.keys() & {"autostop", "num_nodes"}:
        here = {"autostop": "launcher.autostop", "num_nodes": "nodes of the cluster"}[name]
        yield Issue(
            (f"{at}.resources.{name}", f"{at}.resources"),
            f"resources has {name}, which isles has as a separate key",
            f"use {here}",
        )


def _pod_rules(config: RunConfig, cluster: ClusterConfig, key: str) -> Iterator[Issue]:
    launcher = cluster.launcher
    if not isinstance(launcher, KubernetesLauncherConfig):
        return
    folder = PurePosixPath(cluster.workdir or "", config.output_dir)
    kept = [volume.path for volume in launcher.volumes if not volume.read_only]
    if not any(folder.is_relative_to(path) for path in kept):
        on = f"the writable volumes are {', '.join(kept)}" if kept else "no volume is writable"
        yield Issue(
            ("output_dir", f"{key}.launcher.volumes", f"{key}.launcher"),
            f"the run directory would be in {folder} of a pod, and is deleted with the pod: {on}",
            "mount a PersistentVolumeClaim and put output_dir on it: "
            "launcher.volumes: [{claim: runs, path: /runs}], output_dir: /runs",
        )
    if launcher.gpu_resource in launcher.resources:
        yield Issue(
            (f"{key}.launcher.resources",),
            f"gpus_per_node already requests {launcher.gpu_resource}",
            "delete it from resources",
        )
    if launcher.flavor == "trainjob" and not launcher.is_default("keep_job"):
        yield Issue(
            (f"{key}.launcher.keep_job",),
            "keep_job has no effect, as Kubernetes does not delete a TrainJob",
            "delete keep_job, and delete the TrainJob with `isles stop` or kubectl",
        )

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
    """Every rule inside a cluster that is broken."""
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
            f"nodes {cluster.nodes} does not fit a list of {num} hosts",
            f"delete it, or use {num}, or MIN:{num}",
        )
    bundles = cluster.launcher.bundles if isinstance(cluster.launcher, RayLauncherConfig) else ()
    if len(bundles) > 1 and cluster.max_nodes != len(bundles):
        yield Issue(
            (f"{key}.nodes", f"{key}.launcher.bundles"),
            f"nodes {cluster.nodes} does not fit a list of {len(bundles)} bundles",
            f"delete it, or use {len(bundles)}, or MIN:{len(bundles)}; or keep one bundle for all",
        )
    counts = Counter(host.ssh for host in cluster.hosts)
    counts.update(h.address for h in cluster.hosts if h.address not in (None, h.ssh))
    for name in (name for name, count in counts.items() if count > 1):
        yield Issue(
            (f"{key}.launcher.hosts",),
            f"the host {name} is there twice",
            "name each host once; gpus says how many ranks it has",
        )


def _environment_rules(cluster: ClusterConfig, key: str) -> Iterator[Issue]:
    environment = cluster.environment
    if environment.venv is not None and environment.conda is not None:
        yield Issue(
            (f"{key}.environment.conda", f"{key}.environment.venv"),
            f"both venv {environment.venv} and conda {environment.conda} name the Python",
            "keep one of them",
        )
    if environment.python is not None and environment.python.startswith("~"):
        yield Issue(
            (f"{key}.environment.python",),
            f"python {environment.python} is run as it is written, and ~ is no folder",
            "write its whole path, or name the folder of its environment as venv",
        )
    yield from _container_rules(cluster, key)
    allowed = EnvironmentConfig(variables=environment.variables, container=environment.container)
    if cluster.is_here and environment != allowed:
        yield Issue(
            (f"{key}.environment",),
            "the ranks of this machine run in the Python of this command",
            "activate what they need before `isles train`; environment is for other machines",
        )
    if cluster.workdir is not None and cluster.is_here:
        yield Issue(
            (f"{key}.workdir",),
            f"workdir {cluster.workdir} is for other machines",
            "call isles in that folder",
        )
    if cluster.sync is not None and not isinstance(cluster.launcher, SshLauncherConfig):
        yield Issue(
            (f"{key}.sync",),
            f"sync copies files to hosts over ssh, and the launcher is {cluster.launcher.kind}",
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
            f"pyxis is a part of Slurm, and the launcher is {launcher.kind}",
            "use apptainer, or podman where ssh or this machine starts the ranks",
        )
    if container.runtime == "podman" and in_job:
        yield Issue(
            (f"{where}.runtime", where),
            f"podman's containers would not end with the job of {launcher.kind}",
            "use apptainer, or pyxis in Slurm",
        )
    if cluster.is_here and cluster.max_nodes > 1:
        yield Issue(
            (f"{key}.nodes", where),
            f"nodes {cluster.nodes} are processes of this machine, and a container is one node",
            "delete nodes; gpus_per_node says how many ranks there are",
        )


def _queue_rules(cluster: ClusterConfig, key: str) -> Iterator[Issue]:
    launcher = cluster.launcher
    time = launcher.time if isinstance(launcher, QueueSection) else None
    if isinstance(launcher, QueueSection) and time is not None and launcher.save_before >= time:
        yield Issue(
            (f"{key}.launcher.save_before", f"{key}.launcher.time"),
            f"save_before {launcher.save_before:.0f}s leaves nothing of a time limit of "
            f"{time:.0f}s",
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
            f"the GPUs of a {launcher.kind} node cannot be counted from here",
            "add gpus_per_node: the ranks on each node",
        )


def _skypilot_rules(
    cluster: ClusterConfig, launcher: SkypilotLauncherConfig, key: str
) -> Iterator[Issue]:
    at = f"{key}.launcher"
    if cluster.min_nodes < cluster.max_nodes:
        yield Issue(
            (f"{key}.nodes",),
            f"nodes {cluster.nodes} would go on with fewer, and SkyPilot ends all nodes of a job "
            "with the first that ends",
            f"use nodes: {cluster.max_nodes}",
        )
    for name in launcher.accelerators:
        if ":" in name:
            yield Issue(
                (f"{at}.accelerators",),
                f"{name} has a count, and gpus_per_node is it",
                f"write {name.partition(':')[0]}",
            )
    if launcher.accelerators and cluster.device == "cpu":
        yield Issue(
            (f"{at}.accelerators", f"{key}.device"),
            f"the ranks compute on CPUs, and {launcher.accelerators[0]} is asked for",
            "delete one of the two",
        )
    for other in ("accelerators", "any_of", "ordered"):
        if launcher.accelerators and other in launcher.resources:
            yield Issue(
                (f"{at}.resources.{other}", f"{at}.resources", f"{at}.accelerators"),
                f"both accelerators and resources.{other} say which cards will do",
                "keep one of them",
            )
    if launcher.managed and launcher.cluster is not None:
        yield Issue(
            (f"{at}.cluster", f"{at}.managed"),
            f"SkyPilot names the cluster of a managed job, and cluster is {launcher.cluster}",
            "delete one of the two",
        )
    for name in launcher.resources.keys() & {"autostop", "num_nodes"}:
        here = {"autostop": "launcher.autostop", "num_nodes": "nodes of the cluster"}[name]
        yield Issue(
            (f"{at}.resources.{name}", f"{at}.resources"),
            f"resources has {name}, for which there is a key of its own",
            f"use {here}",
        )


def _pod_rules(config: RunConfig, cluster: ClusterConfig, key: str) -> Iterator[Issue]:
    launcher = cluster.launcher
    if not isinstance(launcher, KubernetesLauncherConfig):
        return
    folder = PurePosixPath(cluster.workdir or "", config.output_dir)
    kept = [volume.path for volume in launcher.volumes if not volume.read_only]
    if not any(folder.is_relative_to(path) for path in kept):
        on = f"of volumes that pods can write to there is {', '.join(kept)}" if kept else "no claim"
        yield Issue(
            ("output_dir", f"{key}.launcher.volumes", f"{key}.launcher"),
            f"the run directory would be in {folder} of a pod, and goes with it: {on}",
            "mount a PersistentVolumeClaim and put output_dir on it: "
            "launcher.volumes: [{claim: runs, path: /runs}], output_dir: /runs",
        )
    if launcher.gpu_resource in launcher.resources:
        yield Issue(
            (f"{key}.launcher.resources",),
            f"{launcher.gpu_resource} is asked for by gpus_per_node already",
            "delete it here",
        )
    if launcher.flavour == "trainjob" and not launcher.is_default("keep_job"):
        yield Issue(
            (f"{key}.launcher.keep_job",),
            "a TrainJob is not deleted by Kubernetes after a time",
            "delete keep_job, and the TrainJob by `isles stop` or kubectl",
        )

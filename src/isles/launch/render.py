"""Files that run without isles' control processes: output of `isles render`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from isles import __version__
from isles.config.files import deepspeed_issues, shape_issues
from isles.config.interop.export import deepspeed_json, fsdp_json
from isles.config.load import Loaded
from isles.config.resolve import resolve
from isles.config.sections.cluster import (
    PbsLauncherConfig,
    QueueSection,
    RayLauncherConfig,
    SkypilotLauncherConfig,
    SlurmLauncherConfig,
)
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError, ConfigErrors
from isles.launch.container.rendered import torchrun_words
from isles.launch.gpus import find_gpus
from isles.launch.kubernetes.manifest import KubernetesManifest, job_name
from isles.launch.kubernetes.start import resolve_pods
from isles.launch.queue.script import JobText, fill_template, node_lines, rendered_script
from isles.launch.ray.bundles import ranks_of
from isles.launch.skypilot.task import TaskText, secret_names, task_file
from isles.run.env import SKY_TOKEN, huggingface_cache

Kind = Literal["torchrun", "sbatch", "pbs", "skypilot", "kubernetes", "deepspeed-json", "fsdp-json"]

Device = Literal["cuda", "cpu"]

_BY_HAND_S = 900
"""Longest wait of a node for the others if people start them."""

_SHARED_KEYS = set(QueueSection.model_fields) - {"login", "bin_path", "extra"}


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """A file, and notes about it if the format has no comments."""

    text: str
    notes: tuple[str, ...] = ()


def render(
    loaded: Loaded, to: Kind, *, overrides: tuple[str, ...] = (), output: Path | None = None
) -> RenderedFile:
    """Convert a run file to another tool's file.

    Args:
        to: kind of file.
        overrides: of the command line; the file passes them to the trainer.
        output: path of the future file; None: unknown.

    Raises:
        ConfigError: the run file's strategy is not of that kind, or its ranks do not fit.
        ConfigErrors: every issue in the DeepSpeed JSON of the run file.
    """
    if to == "kubernetes":
        return _manifest(loaded)
    nproc, device, notes = _ranks(loaded)
    command = _command(loaded, overrides)
    match to:
        case "torchrun":
            return RenderedFile(_torchrun_script(loaded, nproc, device, command, notes))
        case "sbatch" | "pbs":
            job = _job(loaded, to, nproc, device, notes)
            path = str(output.absolute()) if output else None
            text = rendered_script(loaded.config, job, command, notes=notes, path=path)
            return RenderedFile(text)
        case "deepspeed-json":
            if issues := deepspeed_issues(loaded):
                raise ConfigErrors(issues)
            data, notes = deepspeed_json(loaded, sum(nproc))
        case "fsdp-json":
            data, notes = fsdp_json(loaded)
        case "skypilot":
            return RenderedFile(_skypilot_task(loaded, device, overrides, notes))
        case _:
            assert_never(to)
    return RenderedFile(json.dumps(data, indent=2) + "\n", tuple(notes))


def _manifest(loaded: Loaded) -> RenderedFile:
    # The objects of `launcher: kubernetes`; unlike scripts they run isles' agents.
    if not isinstance(loaded.config.clusters[0].launcher, KubernetesLauncherConfig):
        raise ConfigError(
            f"the launcher is {loaded.config.clusters[0].launcher.kind}, which has no image",
            where=loaded.where("clusters.0.launcher"),
            fix="set clusters.0.launcher to {kind: kubernetes, image: …, volumes: [{claim: …, "
            "path: …}]}",
        )
    name = job_name(loaded.config.name)
    head = (
        f"# {loaded.config.name}: written by isles {__version__}. Its pods also need a Secret, "
        "whose token is in no file:\n"
        '#   python3 -c \'import json, secrets; print(json.dumps({"token": '
        'secrets.token_hex(16), "join": ""}))\' |\n'
        f"#     kubectl create secret generic {name} --from-file=start=/dev/stdin\n"
    )
    return RenderedFile(head + KubernetesManifest(name, loaded, resolve_pods(loaded)).text())


def script_command(config: RunConfig) -> list[str]:
    """The words after torchrun's own options, if a user's own script runs without isles."""
    assert config.training.script is not None
    return [config.training.script, *map(str, config.training.script_args)]


def _command(loaded: Loaded, overrides: Sequence[str]) -> list[str]:
    # The words after torchrun's own options.
    config = loaded.config
    if config.training.script is not None:
        return script_command(config)
    # On other machines the run file is in workdir, under the name that the user typed.
    is_here = config.clusters[0].workdir is None
    path = loaded.path.absolute() if is_here else loaded.path
    return ["-m", "isles.train", str(path), *overrides]


def _ranks(loaded: Loaded) -> tuple[tuple[int, ...], Device, list[str]]:
    # The ranks of each node, as far as this machine knows, and notes about assumptions.
    cluster = loaded.config.clusters[0]
    notes: list[str] = []
    asked = cluster.gpus_per_node
    device: Device = "cpu" if cluster.device == "cpu" else "cuda"
    num_gpus = 0
    if asked == "auto" or (cluster.is_here and cluster.device == "auto"):
        num_gpus = len(find_gpus().gpus)
        if cluster.device == "auto" and not num_gpus:
            device = "cpu"
    ranks = asked if isinstance(asked, int) else max(1, num_gpus) if device == "cuda" else 1
    if asked == "auto":
        notes.append(f"gpus_per_node is auto, and this machine has {num_gpus} GPUs: {ranks} ranks")
    if isinstance(cluster.launcher, RayLauncherConfig):
        nproc = ranks_of(cluster)
    else:
        nproc = tuple(host.gpus or ranks for host in cluster.hosts) or (ranks,) * cluster.max_nodes
    issues = list(shape_issues(loaded, huggingface_cache()))
    try:
        resolve(loaded, nproc=nproc, device=device)
    except ConfigError as error:
        issues.append(error)
    if issues:
        raise ConfigErrors(issues)
    return nproc, device, notes


def _workdir(loaded: Loaded) -> str:
    return loaded.config.clusters[0].workdir or str(Path.cwd())


def _job(
    loaded: Loaded,
    to: Literal["sbatch", "pbs"],
    nproc: tuple[int, ...],
    device: Device,
    notes: list[str],
) -> JobText:
    if len(set(nproc)) > 1:
        raise ConfigError(
            f"the hosts have {', '.join(map(str, nproc))} ranks, but the nodes of a queue must "
            "have equal numbers of ranks",
            where=loaded.where("clusters.0.launcher.hosts"),
            fix="use --to torchrun, or a run file with nodes and gpus_per_node",
        )
    own = loaded.config.clusters[0].launcher
    wanted = SlurmLauncherConfig if to == "sbatch" else PbsLauncherConfig
    launcher = own
    if not isinstance(own, wanted):
        # Values that the section of the other queue shares.
        is_queue = isinstance(own, QueueSection)
        shared = {key: getattr(own, key) for key in _SHARED_KEYS} if is_queue else {}
        launcher = wanted.model_validate(shared)
        words = "its account, time, cores and memory are used; " if is_queue else ""
        name = "Slurm" if to == "sbatch" else "PBS"
        notes.append(f"the run file's launcher is {own.kind}: {words}check the {name} options")
    assert isinstance(launcher, SlurmLauncherConfig | PbsLauncherConfig)
    if isinstance(launcher, PbsLauncherConfig) and launcher.dialect == "auto":
        notes.append("for OpenPBS (for Torque, add clusters.0.launcher.dialect=torque)")
    return JobText(launcher, len(nproc), nproc[0], device, _workdir(loaded))


def _skypilot_task(
    loaded: Loaded, device: Device, overrides: Sequence[str], notes: list[str]
) -> str:
    own = loaded.config.clusters[0].launcher
    launcher = own if isinstance(own, SkypilotLauncherConfig) else SkypilotLauncherConfig()
    if own is not launcher:
        if loaded.config.clusters[0].gpus_per_node == "auto":
            raise ConfigError(
                "the number of GPUs of SkyPilot's nodes is unknown",
                where=loaded.where("clusters.0.gpus_per_node"),
                fix="add clusters.0.gpus_per_node=8 to the command line, with their real number of "
                "GPUs",
            )
        notes.append(f"the run file's launcher is {own.kind}: check resources and file_mounts")
        key = "clusters.0.launcher={kind: skypilot}"
        overrides = [*overrides, key]
    names = " ".join(f"--secret {name}" for name in secret_names(launcher, has_join=False))
    verb = "jobs launch" if launcher.managed else "launch"
    notes.append(f"start it: {SKY_TOKEN}=$(openssl rand -hex 16) sky {verb} {names} THIS_FILE")
    return task_file(loaded, TaskText(launcher, overrides, device, notes=notes))


def _torchrun_script(
    loaded: Loaded, nproc: tuple[int, ...], device: Device, command: list[str], notes: list[str]
) -> str:
    # Only with static rendezvous does torchrun's --node_rank determine the order of a node's
    # ranks.
    config = loaded.config
    cluster, num_nodes, address = config.clusters[0], len(nproc), None
    if num_nodes > 1:
        notes.append("on every node, within a few minutes of each other: bash THIS_FILE NODE")
    if num_nodes > 1 and not cluster.hosts:
        notes.append("first: export MASTER_ADDR=the address of node 0 for the other nodes")
    elif num_nodes > 1:
        address = cluster.hosts[0].address or cluster.hosts[0].ssh.rpartition("@")[2]
        if not address.replace(".", "").isdecimal():
            notes.append(
                f"on every node, {address} must resolve to an address other than its loopback;"
            )
            notes.append("set one with launcher.hosts: [{ssh: ..., address: ...}]")
    where = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
    return fill_template(
        "torchrun.sh.jinja",
        run=torchrun_words(config, _workdir(loaded), device, cluster.launcher.kind)[0],
        head=[
            f"{config.name}: {sum(nproc)} rank{'s' * (sum(nproc) != 1)} on {where} under torchrun",
            f"written by isles {__version__}; it does not need the command isles to run",
            *notes,
        ],
        setting=node_lines(cluster, _workdir(loaded), nodes=num_nodes, device=device),
        gpus=device == "cuda",
        nproc=nproc,
        names=[host.ssh for host in cluster.hosts],
        address=shlex.quote(address) if address else None,
        interface=cluster.network.interface,
        port=cluster.network.port,
        # A person types the commands of the nodes one after another.
        start_timeout=max(_BY_HAND_S, math.ceil(cluster.start_timeout)),
        command=shlex.join(command),
    )

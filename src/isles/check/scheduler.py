"""Findings on the nodes, GPUs, time and account that Slurm, PBS or Ray has for a job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isles.check.finding import Finding, Level
from isles.config.sections.cluster import (
    ClusterConfig,
    PbsLauncherConfig,
    RayLauncherConfig,
    SlurmLauncherConfig,
)
from isles.errors import PreflightError, UserError
from isles.facts.units import format_duration, parse_duration_s
from isles.launch.queue.pbs import Pbs, read_blocks, walltime_s
from isles.launch.queue.slurm import Slurm
from isles.launch.ray.bundles import bundles, label_selectors, lacking, match_nodes, nodes_text
from isles.launch.ray.jobs import RayJobs
from isles.launch.ssh.shell import CommandResult, Shell

_NAMED = 6

_SLURM_OUT = ("down", "drain", "drng", "fail", "maint", "unk", "inval", "no_respond", "power_down")
_FIELD = re.compile(r"(\w+)=(\S*)")
_GPUS = re.compile(r"gpu(?::[^:,(]+)?:(\d+)")

_PBS_OUT = ("down", "offline", "unknown", "stale", "provisioning", "maintenance")


@dataclass(frozen=True, slots=True)
class QueueNode:
    """A node, as its scheduler reports it.

    Args:
        is_up: whether it accepts jobs, now or later.
        reason: why it does not.
        gpus: number of its GPUs. None: not reported.
    """

    name: str
    state: str
    is_up: bool
    reason: str = ""
    gpus: int | None = None


def queue_findings(
    cluster: ClusterConfig, launcher: SlurmLauncherConfig | PbsLauncherConfig, shell: Shell
) -> list[Finding]:
    """Query the scheduler of a cluster. `shell` has the scheduler's commands."""
    if isinstance(launcher, SlurmLauncherConfig):
        name, possessive = "Slurm", "Slurm's"
        asked = _slurm(cluster, launcher, Slurm(launcher.bin_path, shell))
    else:
        name, possessive = "PBS", "PBS'"
        asked = _pbs(cluster, launcher, Pbs(launcher.bin_path, shell))
    findings: list[Finding] = []
    try:
        findings.extend(asked)
    except PreflightError as error:
        fix = f"set clusters.0.launcher.login to a login node; or set the folder of {possessive} "
        fix += "commands: clusters.0.launcher.bin_path"
        text = f"{name} cannot be queried: {error.what}"
        findings.append(Finding("queue.commands", "error", shell.name, text, fix=fix))
    return findings


def _answers(name: str, where: str, done: CommandResult, fix: str) -> Finding:
    if done.returncode == 0:
        return Finding("queue.commands", "ok", where, f"{name} answers")
    text = f"{name} does not respond: {(done.stderr or done.stdout).strip()}"
    code = f"exit code {done.returncode}"
    return Finding("queue.commands", "error", where, text, code, fix=fix)


def _room(
    where: str, what: str, nodes: Sequence[QueueNode], cluster: ClusterConfig, mend: str
) -> Finding:
    wanted = cluster.max_nodes
    bad = [node for node in nodes if not node.is_up]
    num_up = len(nodes) - len(bad)
    text, fix = f"{num_up} of {len(nodes)} nodes of {what} are available", ""
    level: Level = "warning" if bad else "ok"
    if num_up < wanted:
        level, fix = "error", "use fewer nodes, or another partition"
        text += f", and the run needs {wanted}"
    if bad:
        named = [
            f"{node.name} is {node.state}" + (f" ({node.reason})" if node.reason else "")
            for node in bad[:_NAMED]
        ]
        more = f", and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        text += f": {', '.join(named)}{more}"
        fix = "if these nodes should be up, ask the administrator: "
        fix += mend.format(nodes=",".join(node.name for node in bad[:_NAMED]))
    return Finding("queue.nodes", level, where, text, f"{num_up} up", str(wanted), fix)


def _gres(where: str, what: str, nodes: Sequence[QueueNode], cluster: ClusterConfig) -> Finding:
    gpus = cluster.gpus_per_node if isinstance(cluster.gpus_per_node, int) else 1
    have = [node.gpus or 0 for node in nodes if node.is_up]
    fit = sum(count >= gpus for count in have)
    most = max(have, default=0)
    if fit >= cluster.max_nodes:
        text = f"{fit} nodes of {what} have {gpus} GPUs or more"
        return Finding("queue.gres", "ok", where, text, str(most), str(gpus))
    text = f"{fit} nodes of {what} have the {gpus} GPUs that the run needs on each of its "
    text += f"{cluster.max_nodes} nodes; the largest node has {most}"
    fix = "use a partition with GPUs, or train on CPUs with clusters.0.device=cpu"
    if most:
        fix = f"use gpus_per_node: {most} and more nodes, or another partition"
    return Finding("queue.gres", "error", where, text, str(most), str(gpus), fix)


def _time(where: str, what: str, wanted_s: float | None, most_s: float | None) -> Finding:
    most = format_duration(most_s) if most_s is not None else "no limit"
    if wanted_s is None:
        text = f"the run requests no time limit; {what} allows {most}"
        return Finding("queue.time", "ok", where, text, "default", most)
    wanted = format_duration(wanted_s)
    if most_s is None or wanted_s <= most_s:
        return Finding("queue.time", "ok", where, f"{wanted} of {most}", wanted, most)
    text = f"the run requests {wanted}, and {what} allows {most}"
    fix = f"set clusters.0.launcher.time to {most.replace(' ', '')} or less; with requeue the "
    fix += "run continues in the next job"
    return Finding("queue.time", "error", where, text, wanted, most, fix)


def _slurm(
    cluster: ClusterConfig, launcher: SlurmLauncherConfig, slurm: Slurm
) -> Iterator[Finding]:
    where = slurm.shell.name
    asked = slurm.run("scontrol", "-o", "show", "partition")
    fix = "check slurmctld with scontrol ping; or set clusters.0.launcher.login"
    yield _answers("Slurm", where, asked, fix)
    if asked.returncode:
        return
    partitions = [dict(_FIELD.findall(line)) for line in asked.stdout.splitlines() if line]
    names = ", ".join(own["PartitionName"] for own in partitions)
    if launcher.partition is None:
        found = next((own for own in partitions if own.get("Default") == "YES"), None)
        text = "this Slurm has no default partition, and the run file names none"
    else:
        wanted = launcher.partition.split(",")
        found = next((own for own in partitions if own["PartitionName"] in wanted), None)
        text = f"partition {launcher.partition} not found"
    if found is None:
        fix = f"set clusters.0.launcher.partition to one of: {names}"
        yield Finding("queue.partition", "error", where, text, "absent", names, fix)
        return
    name, state = found["PartitionName"], found.get("State", "UP")
    what, fix = f"the partition {name}", ""
    level: Level = "ok"
    if state != "UP":
        level = "error"
        fix = f"use another partition ({names}), or ask the administrator: scontrol update "
        fix += f"PartitionName={name} State=UP"
    yield Finding("queue.partition", level, where, f"{what} is {state}", state, "UP", fix)
    nodes = _slurm_nodes(slurm, launcher, name)
    yield _room(where, what, nodes, cluster, "scontrol update NodeName={nodes} State=RESUME")
    if cluster.device != "cpu" and launcher.gres != "none":
        yield _gres(where, what, nodes, cluster)
    try:
        most_s = parse_duration_s(found.get("MaxTime", ""))
    except ValueError:
        most_s = None  # UNLIMITED
    yield _time(where, what, launcher.time, most_s)


def _slurm_nodes(slurm: Slurm, launcher: SlurmLauncherConfig, partition: str) -> list[QueueNode]:
    constraint = launcher.constraint or ""
    # Only Slurm can evaluate constraints of more than one word.
    is_word = constraint.replace("-", "_").isidentifier()
    nodes = []
    asked = slurm.run("sinfo", "-h", "-N", "-p", partition, "-o", "%N|%T|%G|%f|%E")
    for line in asked.stdout.splitlines():
        name, state, gres, features, reason = [*line.split("|", 4), "", "", "", ""][:5]
        if is_word and constraint not in features.split(","):
            continue
        is_up = not any(word in state.lower() for word in _SLURM_OUT) and not state.endswith("*")
        gpus = sum(int(count) for count in _GPUS.findall(gres))
        nodes.append(
            QueueNode(name, state, is_up, "" if reason.lower() == "none" else reason, gpus)
        )
    return nodes


def _pbs(cluster: ClusterConfig, launcher: PbsLauncherConfig, pbs: Pbs) -> Iterator[Finding]:
    where = pbs.shell.name
    asked, listed = pbs.run("qstat", "-Qf"), pbs.run("pbsnodes", "-a")
    fix = "check the server with qstat -B; or set clusters.0.launcher.login to its host"
    yield _answers("PBS", where, asked, fix)
    if asked.returncode:
        return
    queues = read_blocks(asked.stdout, "Queue:")
    name = launcher.queue
    if name is None:
        servers = list(read_blocks(pbs.run("qstat", "-Bf").stdout, "Server:").values())
        name = servers[0].get("default_queue") if servers else None
    yield _queue(where, name, queues)
    attributes = queues.get(name or "")
    if attributes is None:
        return
    nodes = [_pbs_node(node, own) for node, own in read_blocks(listed.stdout).items()]
    if nodes:
        yield _room(where, "PBS", nodes, cluster, "pbsnodes -r {nodes}")
    if cluster.device != "cpu" and any(node.gpus is not None for node in nodes):
        yield _gres(where, "PBS", nodes, cluster)
    most = attributes.get("resources_max.walltime", "")
    most_s = walltime_s(most)
    yield _time(where, f"the queue {name}", launcher.time, most_s)


def _queue(where: str, name: str | None, queues: Mapping[str, Mapping[str, str]]) -> Finding:
    names = ", ".join(queues)
    one = f"one of: {names}" if names else "a queue that you may use; `qstat -Q` lists none"
    fix = f"set clusters.0.launcher.queue to {one}"
    if name is None:
        text = "PBS names no default queue, and the run file names none"
        return Finding("queue.partition", "warning", where, text, "none", fix=fix)
    if name not in queues:
        text = f"queue {name} not found"
        return Finding("queue.partition", "error", where, text, "absent", names, fix)
    words, wanted = ("enabled", "started"), "enabled, started"
    closed = [word for word in words if queues[name].get(word, "True").lower() == "false"]
    if not closed:
        text = f"the queue {name} is open"
        return Finding("queue.partition", "ok", where, text, "open", wanted)
    level: Level = "error" if "enabled" in closed else "warning"
    text = f"the queue {name} is not {' and not '.join(closed)}"
    measured = ", ".join(f"not {word}" for word in closed)
    fix = f"use another queue ({names}), or ask the administrator: qenable {name}, qstart {name}"
    return Finding("queue.partition", level, where, text, measured, wanted, fix)


def _pbs_node(name: str, own: Mapping[str, str]) -> QueueNode:
    state = own.get("state", "free")
    is_up = not any(word in state for word in _PBS_OUT)
    gpus = own.get("resources_available.ngpus", own.get("gpus", ""))
    reason = own.get("comment", own.get("note", ""))
    return QueueNode(name, state, is_up, reason, int(gpus) if gpus.isdecimal() else None)


def ray_findings(cluster: ClusterConfig, launcher: RayLauncherConfig, where: str) -> list[Finding]:
    """Query a Ray cluster from this machine. `where`: its name in the findings."""
    try:
        jobs = RayJobs.reach(launcher.address)
        nodes = jobs.nodes()
        theirs, own = jobs.versions()
    except UserError as error:
        return [Finding("queue.commands", "error", where, error.what, fix=error.fix)]
    text = f"the Ray cluster at {jobs.address} responds"
    findings = [Finding("queue.commands", "ok", where, text, theirs, own)]
    if own and theirs != own:
        text = f"the cluster has Ray {theirs}, and this machine would submit with Ray {own}"
        fix = f"pip install 'ray[default]=={theirs}'"
        findings = [Finding("queue.commands", "error", where, text, theirs, own, fix)]
    wanted, labels = bundles(cluster), label_selectors(cluster)
    fitting = match_nodes(wanted, labels, nodes)
    measured, limit = f"{len(fitting)} fit", str(len(wanted))
    if len(fitting) == len(wanted):
        text = f"{len(nodes)} nodes, with one for each of {len(wanted)} bundles"
        found = Finding("queue.nodes", "ok", where, text, measured, limit)
    else:
        level: Level = "error" if len(fitting) < cluster.min_nodes else "warning"
        text = f"{lacking(wanted, labels, fitting)} ({nodes_text(nodes)})"
        fix = "start Ray on more machines, wait for its autoscaler, or correct "
        fix += "clusters.0.launcher.bundles; nodes in use count too"
        found = Finding("queue.nodes", level, where, text, measured, limit, fix)
    return [*findings, found]

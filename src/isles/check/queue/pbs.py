"""What PBS says of the place that a job asks for."""

from __future__ import annotations

import re

from isles.check.finding import Finding
from isles.check.queue.nodes import QueueNode, judge_gres, judge_nodes, judge_time
from isles.config.sections.cluster import ClusterConfig, PbsLauncherConfig
from isles.errors import PreflightError
from isles.facts.units import parse_duration_s
from isles.launch.pbs.job import Pbs

_OUT = ("down", "offline", "unknown", "stale", "provisioning", "maintenance")
_ATTRIBUTE = re.compile(r"^\s+([\w.]+) = (.*)$")


def check_pbs(cluster: ClusterConfig, launcher: PbsLauncherConfig, pbs: Pbs) -> list[Finding]:
    """Findings of queue, nodes, GPUs and time."""
    where = pbs.shell.name
    try:
        queues = pbs.run("qstat", "-Qf")
        nodes = pbs.run("pbsnodes", "-a")
    except PreflightError as error:
        fix = "on a login node: clusters[0].launcher.login; or name the folder of PBS' commands: "
        fix += "clusters[0].launcher.bin_path"
        what = f"PBS cannot be asked: {error.what}"
        return [Finding("queue.commands", "error", where, what, fix=fix)]
    if queues.returncode:
        return [
            Finding(
                "queue.commands",
                "error",
                where,
                f"PBS does not answer: {(queues.stderr or queues.stdout).strip()}",
                measured=f"exit code {queues.returncode}",
                fix="is the server up? qstat -B; on another machine: clusters[0].launcher.login",
            )
        ]
    findings = [Finding("queue.commands", "ok", where, "PBS answers")]
    found = _queue(pbs, launcher, _blocks(queues.stdout, "Queue:"), findings)
    if found is None:
        return findings
    name, attributes = found
    what = f"the queue {name}"
    known = [_node(node, facts) for node, facts in _blocks(nodes.stdout).items()]
    if known:
        mend = "pbsnodes -r {nodes}"
        findings.append(judge_nodes(where, "PBS", known, cluster.max_nodes, mend))
        if cluster.device != "cpu" and any(node.gpus is not None for node in known):
            gpus = cluster.gpus_per_node if isinstance(cluster.gpus_per_node, int) else 1
            findings.append(judge_gres(where, "PBS", known, cluster.max_nodes, gpus))
    most = attributes.get("resources_max.walltime")
    findings.append(
        judge_time(where, what, launcher.time, parse_duration_s(most) if most else None)
    )
    return findings


def _queue(
    pbs: Pbs,
    launcher: PbsLauncherConfig,
    queues: dict[str, dict[str, str]],
    findings: list[Finding],
) -> tuple[str, dict[str, str]] | None:
    where, names = pbs.shell.name, ", ".join(queues)
    one = f"one of: {names}" if names else "a queue that you may use; `qstat -Q` names none"
    name = launcher.queue
    if name is None:
        servers = list(_blocks(pbs.run("qstat", "-Bf").stdout, "Server:").values())
        name = servers[0].get("default_queue") if servers else None
        if name is None:
            findings.append(
                Finding(
                    "queue.partition",
                    "warning",
                    where,
                    "PBS names no default queue, and the run file names none",
                    measured="none",
                    fix=f"set clusters[0].launcher.queue to {one}",
                )
            )
            return None
    attributes = queues.get(name)
    if attributes is None:
        fix = f"set clusters[0].launcher.queue to {one}"
        text = f"there is no queue {name}"
        findings.append(Finding("queue.partition", "error", where, text, "absent", names, fix))
        return None
    closed = [
        word for word in ("enabled", "started") if attributes.get(word, "True").lower() == "false"
    ]
    findings.append(
        Finding(
            "queue.partition",
            "error" if "enabled" in closed else "warning" if closed else "ok",
            where,
            f"the queue {name} is not {' and not '.join(closed)}"
            if closed
            else f"the queue {name} is open",
            measured=", ".join(f"not {word}" for word in closed) or "open",
            limit="enabled, started",
            fix=f"use another: {names}; or ask the administrator: qenable {name}, qstart {name}"
            if closed
            else "",
        )
    )
    return name, attributes


def _blocks(text: str, sign: str = "") -> dict[str, dict[str, str]]:
    """Blocks of `key = value` lines, by the unindented line that heads each."""
    blocks: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line[0].isspace():
            current = blocks.setdefault(line.removeprefix(sign).strip(), {})
        elif match := _ATTRIBUTE.match(line):
            current[match[1]] = match[2].strip()
    return blocks


def _node(name: str, facts: dict[str, str]) -> QueueNode:
    state = facts.get("state", "free")
    gpus = facts.get("resources_available.ngpus", facts.get("gpus"))
    return QueueNode(
        name,
        state,
        not any(word in state for word in _OUT),
        facts.get("comment", facts.get("note", "")),
        int(gpus) if gpus is not None and gpus.isdigit() else None,
    )

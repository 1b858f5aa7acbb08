"""What Slurm says of the place that a job asks for."""

from __future__ import annotations

import re

from isles.check.finding import Finding
from isles.check.queue.nodes import QueueNode, judge_gres, judge_nodes, judge_time
from isles.config.sections.cluster import ClusterConfig, SlurmLauncherConfig
from isles.errors import PreflightError
from isles.facts.units import parse_duration_s
from isles.launch.slurm.job import Slurm

_OUT = ("down", "drain", "drng", "fail", "maint", "unk", "inval", "no_respond", "power_down")
_FIELD = re.compile(r"(\w+)=(\S*)")
_GPUS = re.compile(r"gpu(?::[^:,(]+)?:(\d+)")


def check_slurm(
    cluster: ClusterConfig, launcher: SlurmLauncherConfig, slurm: Slurm
) -> list[Finding]:
    """Findings of partition, nodes, GPUs, time, account and quality of service."""
    where = slurm.shell.name
    try:
        answer = slurm.run("scontrol", "-o", "show", "partition")
    except PreflightError as error:
        fix = (
            "on a login node: clusters[0].launcher.login; or name the folder of Slurm's commands: "
        )
        fix += "clusters[0].launcher.bin_path"
        what = f"Slurm cannot be asked: {error.what}"
        return [Finding("queue.commands", "error", where, what, fix=fix)]
    if answer.returncode:
        said = (answer.stderr or answer.stdout).strip()
        return [
            Finding(
                "queue.commands",
                "error",
                where,
                f"Slurm does not answer: {said}",
                measured=f"exit code {answer.returncode}",
                fix="is slurmctld up? scontrol ping; elsewhere: clusters[0].launcher.login",
            )
        ]
    findings = [Finding("queue.commands", "ok", where, "Slurm answers")]
    partitions = [dict(_FIELD.findall(line)) for line in answer.stdout.splitlines() if line]
    chosen = _partition(launcher, partitions, where, findings)
    if chosen is None:
        return findings
    what = f"the partition {chosen['PartitionName']}"
    nodes = _nodes(slurm, launcher, chosen["PartitionName"])
    mend = "scontrol update NodeName={nodes} State=RESUME"
    findings.append(judge_nodes(where, what, nodes, cluster.max_nodes, mend))
    if cluster.device != "cpu" and launcher.gres != "none":
        gpus = cluster.gpus_per_node if isinstance(cluster.gpus_per_node, int) else 1
        findings.append(judge_gres(where, what, nodes, cluster.max_nodes, gpus))
    findings.append(judge_time(where, what, launcher.time, _seconds(chosen.get("MaxTime"))))
    findings += _account(slurm, launcher, chosen)
    return findings


def _partition(
    launcher: SlurmLauncherConfig,
    partitions: list[dict[str, str]],
    where: str,
    findings: list[Finding],
) -> dict[str, str] | None:
    names = ", ".join(p["PartitionName"] for p in partitions)
    if launcher.partition is None:
        found = next((p for p in partitions if p.get("Default") == "YES"), None)
        missing = "this Slurm has no default partition, and the run file names none"
    else:
        wanted = launcher.partition.split(",")
        found = next((p for p in partitions if p["PartitionName"] in wanted), None)
        missing = f"there is no partition {launcher.partition}"
    if found is None:
        fix = f"set clusters[0].launcher.partition to one of: {names}"
        findings.append(Finding("queue.partition", "error", where, missing, "absent", names, fix))
        return None
    name, state = found["PartitionName"], found.get("State", "UP")
    is_up = state == "UP"
    findings.append(
        Finding(
            "queue.partition",
            "ok" if is_up else "error",
            where,
            f"the partition {name} is {state}",
            measured=state,
            limit="UP",
            fix=""
            if is_up
            else f"use another: {names}; or ask the administrator: scontrol update "
            f"PartitionName={name} State=UP",
        )
    )
    return found


def _nodes(slurm: Slurm, launcher: SlurmLauncherConfig, partition: str) -> list[QueueNode]:
    answer = slurm.run("sinfo", "-h", "-N", "-p", partition, "-o", "%N|%T|%G|%f|%E")
    nodes = []
    for line in answer.stdout.splitlines():
        name, state, gres, features, reason = [*line.split("|", 4), "", "", "", ""][:5]
        if launcher.constraint and not _has(features, launcher.constraint):
            continue
        is_up = not any(word in state.lower() for word in _OUT) and not state.endswith("*")
        gpus = sum(int(count) for count in _GPUS.findall(gres))
        why = reason if reason.lower() != "none" else ""
        nodes.append(QueueNode(name, state, is_up, why, gpus))
    return nodes


def _has(features: str, constraint: str) -> bool:
    """Whether a node may fit; what is not a single word is Slurm's to judge."""
    return not constraint.replace("-", "_").isidentifier() or constraint in features.split(",")


def _seconds(limit: str | None) -> float | None:
    try:
        return parse_duration_s(limit or "")
    except ValueError:
        return None  # UNLIMITED


def _account(
    slurm: Slurm, launcher: SlurmLauncherConfig, partition: dict[str, str]
) -> list[Finding]:
    """Account and quality of service, as far as Slurm tells: without slurmdbd it knows of none."""
    where = slurm.shell.name
    allowed = partition.get("AllowAccounts", "ALL")
    if launcher.account and allowed != "ALL" and launcher.account not in allowed.split(","):
        return [_refused(where, "account", launcher.account, allowed.split(","))]
    if launcher.account is None and launcher.qos is None:
        return []
    user = slurm.shell.run(["id", "-un"], timeout_s=20).stdout.strip()
    try:
        answer = slurm.run("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account,qos")
    except PreflightError:
        answer = None
    rows = [line.split("|") for line in answer.stdout.splitlines()] if answer else []
    if not rows:
        text = "Slurm does not say which accounts there are; sbatch will"
        return [Finding("queue.account", "ok", where, text, "not said")]
    accounts = sorted({row[0] for row in rows})
    if launcher.account and launcher.account not in accounts:
        return [_refused(where, "account", launcher.account, accounts)]
    own = [row for row in rows if launcher.account in (None, row[0])]
    services = sorted({name for row in own if len(row) > 1 for name in row[1].split(",") if name})
    if launcher.qos and launcher.qos not in services:
        return [_refused(where, "qos", launcher.qos, services)]
    text = f"account {launcher.account or 'by default'}, qos {launcher.qos or 'by default'}"
    return [Finding("queue.account", "ok", where, text, "valid")]


def _refused(where: str, what: str, given: str, there: list[str]) -> Finding:
    return Finding(
        "queue.account",
        "error",
        where,
        f"you have no {what} {given} there",
        measured=given,
        limit=", ".join(there),
        fix=f"set clusters[0].launcher.{what} to one of: {', '.join(there)}",
    )

"""Findings on what a Ray cluster has for a run: whether it answers, and nodes for the bundles."""

from __future__ import annotations

from isles.check.finding import Finding, Level
from isles.config.sections.cluster import ClusterConfig, RayLauncherConfig
from isles.errors import UserError
from isles.launch.ray.bundles import bundles, label_selectors, lacking, match_nodes, nodes_text
from isles.launch.ray.jobs import RayJobs


def ray_findings(cluster: ClusterConfig, launcher: RayLauncherConfig, where: str) -> list[Finding]:
    """Ask a Ray cluster from this machine; `where`: its name in the findings."""
    try:
        jobs = RayJobs.reach(launcher.address)
        nodes = jobs.nodes()
        theirs, own = jobs.versions()
    except UserError as error:
        return [Finding("queue.commands", "error", where, error.what, fix=error.fix)]
    text = f"the Ray cluster at {jobs.address} answers"
    findings = [Finding("queue.commands", "ok", where, text, theirs, own)]
    if theirs != own:
        text = f"the cluster has Ray {theirs}, and its job would be started with Ray {own}"
        fix = f"pip install 'ray[default]=={theirs}'"
        findings = [Finding("queue.commands", "error", where, text, theirs, own, fix)]
    wanted, labels = bundles(cluster), label_selectors(cluster)
    fitting = match_nodes(wanted, labels, nodes)
    measured, limit = f"{len(fitting)} fit", str(len(wanted))
    if len(fitting) == len(wanted):
        text = f"{len(nodes)} nodes, and one for each of {len(wanted)} bundles"
        found = Finding("queue.nodes", "ok", where, text, measured, limit)
    else:
        level: Level = "error" if len(fitting) < cluster.min_nodes else "warning"
        text = f"{lacking(wanted, labels, fitting)} ({nodes_text(nodes)})"
        fix = "start Ray on more machines, let its autoscaler bring them, or correct "
        fix += "clusters[0].launcher.bundles; what counts is what a node has, free or not"
        found = Finding("queue.nodes", level, where, text, measured, limit, fix)
    return [*findings, found]

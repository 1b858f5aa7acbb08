"""How the clusters of one run stand, wherever their run directories are."""

from __future__ import annotations

from isles.launch.meeting import local_line
from isles.monitor.collect import RunReport
from isles.monitor.everywhere import reports_of
from isles.run.find import run_of
from isles.run.join_line import JoinLine
from isles.run.several import ClusterRun, SeveralRun

ALIVE = ("running", "queued")


def cluster_reports(run: SeveralRun) -> dict[str, RunReport]:
    """How each cluster stands that was started; all machines are asked at once."""
    there = {c.name: found for c in run.clusters if (found := run_of(run, c)) is not None}
    reports = reports_of(list(there.values()), run.path.parent)
    return dict(zip(there, reports, strict=True))


def furthest(run: SeveralRun) -> str | None:
    """The cluster that has taken in the most turns, and so what the others have learnt till then.

    None: no cluster is known to have saved anything.
    """
    reports = cluster_reports(run)
    saved = [name for name, report in reports.items() if report.checkpoint_step is not None]
    return max(saved, key=lambda name: turns_of(reports[name]), default=None)


def turns_of(report: RunReport) -> int:
    """How many turns a cluster has taken in."""
    return int((report.outer or {}).get("turn") or 0)


def place_of(cluster: ClusterRun) -> str:
    """What is typed to mean the run of a cluster, from anywhere on this machine."""
    return f"{cluster.ssh}:{cluster.path}" if cluster.ssh else cluster.path


def line_of(run: SeveralRun) -> JoinLine:
    """How this machine reaches the rendezvous of a run.

    Raises:
        ConfigError: it is not known.
    """
    return JoinLine.read(run.join_file) if run.rendezvous else local_line(run.state)

"""How the clusters of one run stand, wherever their run directories are."""

from __future__ import annotations

from isles.launch.meeting import local_line
from isles.monitor.collect import RunReport
from isles.monitor.everywhere import reports_of
from isles.rundir.find import run_of
from isles.rundir.join_line import JoinLine
from isles.rundir.several import ClusterRun, SeveralRun

ALIVE = ("running", "queued")


def cluster_reports(run: SeveralRun) -> dict[str, RunReport]:
    """How each cluster stands that was started; all machines are asked at once."""
    there = {c.name: found for c in run.clusters if (found := run_of(run, c)) is not None}
    reports = reports_of(list(there.values()), run.path.parent)
    return dict(zip(there, reports, strict=True))


def place_of(cluster: ClusterRun) -> str:
    """What is typed to mean the run of a cluster, from anywhere on this machine."""
    return f"{cluster.ssh}:{cluster.path}" if cluster.ssh else cluster.path


def line_of(run: SeveralRun) -> JoinLine:
    """How this machine reaches the rendezvous of a run.

    Raises:
        ConfigError: it is not known.
    """
    return JoinLine.read(run.join_file) if run.rendezvous else local_line(run.state)

"""How a run on several clusters ended: each cluster in a line, and where the model is."""

from __future__ import annotations

from collections.abc import Mapping

from isles.errors import ExitCode
from isles.monitor.collect import RunReport
from isles.monitor.multi_cluster.state import ALIVE, cluster_reports, turns_of
from isles.monitor.table import steps_text
from isles.run.find import typed_name
from isles.run.several import SeveralRun

_ORDER = ("failed", "killed", "gone", "unreachable", "unknown", "new", "queued", "running")


def state_of(reports: Mapping[str, RunReport], run: SeveralRun) -> str:
    """The whole run in a word: what runs, else the worst of its clusters' ends."""
    states = [reports[c.name].state if c.name in reports else "new" for c in run.clusters]
    for state in ("running", "queued", "unreachable", "unknown"):
        if state in states:
            return state
    for state in ("failed", "killed", "gone", "stopped", "new"):
        if state in states:
            return state
    return "finished"


def end_lines(run: SeveralRun, codes: Mapping[str, int]) -> tuple[list[str], int]:
    """What is said at the end of following, and the exit code.

    Args:
        run: the run.
        codes: exit codes of the clusters that were followed.
    """
    reports = cluster_reports(run)
    state = state_of(reports, run)
    is_half = state == "finished" and any(codes.values())
    lines = [f"{run.name} " + ("has ended" if is_half else _ENDS.get(state, f"is {state}"))]
    width = max(len(cluster.name) for cluster in run.clusters)
    for cluster in run.clusters:
        lines.append(f"  {cluster.name.ljust(width)}  {_end_text(reports.get(cluster.name))}")
    lines += model_lines(run, reports)
    if state != "finished" and not any(r.state in ALIVE for r in reports.values()):
        typed = f"`{run.typed}`" if run.typed else "the same `isles train` command"
        lines.append(f"  {typed} goes on with all of them")
    return lines, worst(codes.values())


_ENDS = {
    "finished": "is finished",
    "stopped": "has stopped",
    "failed": "has failed",
    "killed": "was killed",
    "running": "still runs",
}


def worst(codes: object) -> int:
    """The exit code of all clusters together: a failure before a stop, and a stop before an end."""
    found = [code for code in codes if code]  # type: ignore[attr-defined]
    failures = [code for code in found if code not in (ExitCode.INTERRUPTED, ExitCode.REQUEUE)]
    return max(failures or found, default=ExitCode.OK)


def _end_text(report: RunReport | None) -> str:
    if report is None:
        return "was never started"
    step = f" at step {steps_text(report.step, report.total_steps)}" if report.step else ""
    reason = f": {report.reason}" if report.reason not in ("", report.state) else ""
    return f"{report.state}{step}{reason}"


def model_lines(run: SeveralRun, reports: Mapping[str, RunReport]) -> list[str]:
    """Where the model is: clusters that have taken in the same turns hold the same."""
    names = [c.name for c in run.clusters if c.name in reports]
    done = {name: reports[name] for name in names if reports[name].state == "finished"}
    if not done:
        return []
    newest = max(done, key=lambda name: _version(done[name])[0])
    places = {
        name: f"{r.on}:{r.path}/model" if r.on else f"{r.path}/model" for name, r in done.items()
    }
    lines = [f"  the model   {places.pop(newest)}"]
    for name, place in places.items():
        lines.append(f"  {_compared(done[name], done[newest]):<11} {place}")
    return [*lines, f'  next        isles generate {typed_name(run)} --prompt "Once"']


def _compared(report: RunReport, newest: RunReport) -> str:
    """A cluster's weights beside those of the newest."""
    if _version(report) != _version(newest):
        return "OTHER weights, of fewer turns"
    if all((each.outer or {}).get("is_averaged") for each in (report, newest)):
        return "the same weights"
    return "OTHER weights, trained on since the last turn"


def _version(report: RunReport) -> tuple[int, str]:
    """How many turns a cluster has taken in, and the digest of the last."""
    outer = report.outer or {}
    return turns_of(report), str((outer.get("last_turn") or {}).get("digest"))

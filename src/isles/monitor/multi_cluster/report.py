"""`isles status` of a run on several clusters: how each stands, and what goes on between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from isles.errors import UserError
from isles.facts.units import format_bytes, format_count, format_duration
from isles.launch.meeting import rendezvous_process
from isles.monitor.collect import RunReport
from isles.monitor.multi_cluster.end import model_lines, state_of
from isles.monitor.multi_cluster.state import ALIVE, cluster_reports, line_of
from isles.monitor.table import steps_text
from isles.run.ask import ask_rendezvous
from isles.run.join_line import JoinLine
from isles.run.several import SeveralRun, list_several

_ANSWER_S = 4.0
_SLOW = 0.8
"""A cluster is called slow that has done less than this part of what the fastest has."""


@dataclass(frozen=True, slots=True)
class SeveralReport:
    """A run on several clusters at one moment.

    Args:
        run: the run.
        state: in one word.
        clusters: those that were started, by name.
        rendezvous: what it answers to `/v1/status`; None where it does not.
        silence: why not.
        at: now, in seconds since the epoch.
    """

    run: SeveralRun
    state: str
    clusters: dict[str, RunReport]
    rendezvous: dict[str, Any] | None
    silence: str
    at: float

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        clusters = []
        for cluster in self.run.clusters:
            report = self.clusters.get(cluster.name)
            row = {**asdict(cluster), "report": report.record() if report else None}
            clusters.append(row)
        return {
            "name": self.run.name,
            "path": str(self.run.path),
            "state": self.state,
            "begun_at": self.run.begun_at,
            "started_at": self.run.started_at,
            "clusters": clusters,
            "rendezvous": self.rendezvous,
            "rendezvous_fault": self.silence,
        }


def several_report(run: SeveralRun) -> SeveralReport:
    """How a run on several clusters stands; its machines and its rendezvous are asked."""
    reports = cluster_reports(run)
    state = state_of(reports, run)
    answer, silence = _ask(run)
    return SeveralReport(run, state, reports, answer, silence, time.time())


def _ask(run: SeveralRun) -> tuple[dict[str, Any] | None, str]:
    if not run.meets:
        return None, ""
    if not run.rendezvous and rendezvous_process(run.state) is None:
        return None, "it does not run"
    try:
        return ask_rendezvous(line_of(run), "/v1/status", _ANSWER_S), ""
    except UserError as error:
        return None, f"{error.what} ({error.where})"


def several_lines(report: SeveralReport) -> list[str]:
    """One run on several clusters, in full."""
    run = report.run
    rows = _rows(report)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines = [run.name, f"  state      {report.state}", *_meeting_lines(report), "", *table]
    lines += [f"  {text}" for text in _remarks(report)]
    if report.state == "finished":
        lines += model_lines(run, report.clusters)
    elif not any(r.state in ALIVE for r in report.clusters.values()):
        typed = f"`{run.typed}`" if run.typed else "`isles train` with its run file"
        lines.append(f"  {typed} goes on with all of them")
    lines.append(f"  directory  {run.path}")
    return lines


def _meeting_lines(report: SeveralReport) -> list[str]:
    if not report.run.meets:
        return ["  meeting    without a rendezvous: engine hivemind"]
    place = report.run.rendezvous
    if not place:
        try:
            place = JoinLine.read(report.run.join_file).address
        except UserError:
            place = "this machine"
    answer = report.rendezvous
    if answer is None:
        is_over = report.state in ("finished", "stopped", "failed", "killed")
        return [] if is_over else [f"  meeting    at {place}: {report.silence}"]
    lines = [f"  meeting    at {place}, turn {answer.get('turn')}"]
    fragments = int(answer.get("fragments") or 0)
    if fragments > 1:
        lines[0] += f" (round {int(answer.get('turn') or 0) // fragments}, {fragments} fragments)"
    for turn in answer.get("open") or []:
        missing = turn.get("missing") or {}
        names = [
            f"{name} ({missing[name]})" if missing.get(name) else name
            for name in turn.get("waits_for") or []
        ]
        if names and turn.get("contributed"):
            due = turn.get("due_in_s")
            by = f", for {format_duration(due)} more" if due is not None else ""
            lines.append(f"  waiting    turn {turn['turn']} waits for {', '.join(names)}{by}")
    return lines


def _rows(report: SeveralReport) -> list[tuple[str, ...]]:
    head = ("cluster", "launcher", "state", "step", "loss", "tokens/s", "weight", "up", "down")
    rows: list[tuple[str, ...]] = [(*head, "sync", "hidden", "heard")]
    members = {m["name"]: m for m in (report.rendezvous or {}).get("members", [])}
    weights = _weights(report)
    for cluster in report.run.clusters:
        found = report.clusters.get(cluster.name)
        member = members.get(cluster.name)
        if found is None:
            rows.append((cluster.name, cluster.launcher, "never started", *("-",) * 9))
            continue
        outer = found.outer or {}
        rows.append(
            (
                cluster.name,
                found.launcher,
                f"{found.state}: {found.queue or found.phase}"
                if found.state in ALIVE and (found.queue or found.phase not in (None, "training"))
                else str(found.state),
                steps_text(found.step, found.total_steps),
                f"{found.loss:.4f}" if found.loss is not None else "-",
                format_count(found.tokens_per_second) if found.tokens_per_second else "-",
                _share(weights.get(cluster.name)),
                _size(outer.get("sent_bytes")),
                _size(outer.get("received_bytes")),
                _sync_text(outer),
                _share(outer.get("hidden_share")),
                f"{member['heard_s']:.0f}s ago" if member and found.state in ALIVE else "-",
            )
        )
    return rows


def _weights(report: SeveralReport) -> dict[str, float]:
    """The part of each cluster in the last turn that any of them has taken in."""
    outers = [r.outer or {} for r in report.clusters.values()]
    turns = [turn for outer in outers if (turn := outer.get("last_turn"))]
    if not turns:
        return {}
    tokens = max(turns, key=lambda turn: turn.get("turn", -1)).get("weights") or {}
    whole = sum(tokens.values())
    return {name: count / whole for name, count in tokens.items()} if whole else {}


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _size(value: float | None) -> str:
    return format_bytes(value) if value else "-"


def _sync_text(outer: dict[str, Any]) -> str:
    """Seconds that averaging has taken, hidden or not."""
    seconds = (outer.get("exposed_s") or 0.0) + (outer.get("hidden_s") or 0.0)
    return format_duration(seconds) if seconds else "-"


def _remarks(report: SeveralReport) -> list[str]:
    """Who is slow, behind, or away, and why."""
    lines = []
    members = {m["name"]: m for m in (report.rendezvous or {}).get("members", [])}
    speeds = {
        name: r.tokens_per_second
        for name, r in report.clusters.items()
        if r.state == "running" and r.tokens_per_second
    }
    fastest = max(speeds.values(), default=0.0)
    for cluster in report.run.clusters:
        name = cluster.name
        found, member = report.clusters.get(name), members.get(name)
        if found is None:
            continue
        outer = found.outer or {}
        if found.state == "queued":
            lines.append(f"{name} waits in its queue; the others train and average without it")
        elif (
            found.state in ("failed", "killed", "unreachable", "gone")
            and report.state != found.state
        ):
            lines.append(f"{name}: {found.reason or found.state}; {found.hint}".rstrip("; "))
        if found.state != "running":
            continue
        if outer and not outer.get("is_connected", True):
            whom = "the rendezvous" if report.run.meets else "the others"
            lines.append(f"{name} does not reach {whom}, and trains on alone")
        elif outer.get("is_behind") or (member and member["is_behind"]):
            lines.append(f"{name} is behind, and takes the weights of another")
        elif member and member["state"] not in ("living", "finished"):
            lines.append(
                f"{name} is not in the turns: {member['state']}, heard {member['heard_s']:.0f}s ago"
            )
        refused = [str(member["refused"])] if member and member.get("refused") else []
        why = (*found.stalls, *_slow(name, speeds, fastest, outer), *refused)
        lines += [f"{name}: {text}" for text in why]
    return lines


def _slow(
    name: str, speeds: dict[str, float], fastest: float, outer: dict[str, Any]
) -> Sequence[str]:
    """Why the others wait for it, if they do."""
    found = []
    if name in speeds and speeds[name] < _SLOW * fastest:
        found.append(
            f"computes {format_count(speeds[name])} tokens/s, the fastest {format_count(fastest)}"
        )
    steps_s, hidden_s = outer.get("exposed_s") or 0.0, outer.get("hidden_s") or 0.0
    if steps_s > 60.0 and steps_s > hidden_s:
        found.append(f"has waited {format_duration(steps_s)} for averages, with no step meanwhile")
    return found


def with_several(reports: Sequence[RunReport], output_dir: Path) -> list[RunReport]:
    """The rows of a table: clusters below their run, which has a row of its own.

    Args:
        reports: of all runs, the newest first.
        output_dir: where runs are.
    """
    left, rows = list(reports), []
    for run in reversed(list_several(output_dir)):
        found: dict[str, RunReport] = {}
        for cluster in run.clusters:
            for report in left:
                # A folder that another machine shares with this one is seen here.
                if report.path == cluster.path and report.on in ("", cluster.ssh):
                    found[cluster.name] = report
        left = [report for report in left if report not in found.values()]
        rows.append((run.started_at, [_whole(run, found), *_below(run, found)]))
    rows += [(report.begun_at or 0.0, [report]) for report in left]
    rows.sort(key=lambda row: row[0], reverse=True)
    return [report for _, group in rows for report in group]


def _below(run: SeveralRun, found: dict[str, RunReport]) -> list[RunReport]:
    reports = [found[c.name] for c in run.clusters if c.name in found]
    return [replace(report, name=f"  {report.name}") for report in reports]


def _whole(run: SeveralRun, found: dict[str, RunReport]) -> RunReport:
    """A run on several clusters as a row."""
    reports = list(found.values())
    ahead = max(reports, key=lambda r: r.step or 0, default=None)
    speeds = [r.tokens_per_second for r in reports if r.state == "running" and r.tokens_per_second]
    return RunReport.of(
        {
            "name": run.name,
            "path": str(run.path),
            "state": state_of(found, run),
            "step": ahead.step if ahead else None,
            "total_steps": ahead.total_steps if ahead else None,
            "loss": ahead.loss if ahead else None,
            "tokens_per_second": sum(speeds) if speeds else None,
            "eta_s": max((r.eta_s for r in reports if r.eta_s is not None), default=None),
            "begun_at": run.started_at,
            "host": f"{len(run.clusters)} clusters: {', '.join(c.name for c in run.clusters)}",
            "launcher": "local",
        }
    )

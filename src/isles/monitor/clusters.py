"""A run on several clusters: how each of them stands, what goes on between them, how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from isles.errors import ExitCode, UserError
from isles.facts.units import format_bytes, format_count, format_duration
from isles.launch.hub import local_line, rendezvous_process
from isles.monitor.remote import reports_of
from isles.monitor.status import ReportState, RunReport
from isles.monitor.table import columns, steps_text
from isles.run.ask import ask_rendezvous
from isles.run.find import run_of, typed_name
from isles.run.join_line import JoinLine
from isles.run.several import SeveralRun, list_several

ALIVE = ("running", "queued")

_WORST_FIRST: tuple[ReportState, ...] = (
    *("running", "queued", "unreachable", "unknown"),
    *("failed", "killed", "gone", "stopped", "new"),
)
_ANSWER_S = 4.0
_SLOW = 0.8
"""A cluster is called slow that has done less than this part of what the fastest has."""

_ENDS = {
    "finished": "is finished",
    "stopped": "has stopped",
    "failed": "has failed",
    "killed": "was killed",
    "running": "still runs",
}


def cluster_reports(run: SeveralRun) -> dict[str, RunReport]:
    """How each cluster stands that was started; all machines are asked at once."""
    there = {c.name: found for c in run.clusters if (found := run_of(run, c)) is not None}
    reports = reports_of(list(there.values()), run.path.parent)
    return dict(zip(there, reports, strict=True))


def furthest(run: SeveralRun) -> str | None:
    """The cluster that has taken in the most rounds, and so what the others have learnt till then.

    None: no cluster is known to have saved anything.
    """
    reports = cluster_reports(run)
    saved = [name for name, report in reports.items() if report.checkpoint_step is not None]
    return max(saved, key=lambda name: _version(reports[name])[0], default=None)


def hub_line(run: SeveralRun) -> JoinLine:
    """How this machine reaches the hub of a run.

    Raises:
        ConfigError: it is not known.
    """
    return JoinLine.read(run.join_file) if run.rendezvous else local_line(run.state)


@dataclass(frozen=True, slots=True)
class SeveralReport:
    """A run on several clusters at one moment.

    Args:
        run: the run.
        state: in one word.
        clusters: those that were started, by name.
        rendezvous: what it answers to `/v1/status`; None where it does not.
        silence: why not.
    """

    run: SeveralRun
    state: str
    clusters: dict[str, RunReport]
    rendezvous: dict[str, Any] | None
    silence: str

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
    answer, silence = None, ""
    if run.meets and not run.rendezvous and rendezvous_process(run.state) is None:
        silence = "it does not run"
    elif run.meets:
        try:
            answer = ask_rendezvous(hub_line(run), "/v1/status", _ANSWER_S)
        except UserError as error:
            silence = f"{error.what} ({error.where})"
    return SeveralReport(run, _state_of(reports, run), reports, answer, silence)


def several_lines(report: SeveralReport) -> list[str]:
    """One run on several clusters, in full."""
    run = report.run
    lines = [run.name, f"  state      {report.state}", *_hub_lines(report), ""]
    lines += [f"  {text}" for text in (*columns(_rows(report)), *_remarks(report))]
    if report.state == "finished":
        lines += _model_lines(run, report.clusters)
    elif not any(r.state in ALIVE for r in report.clusters.values()):
        typed = f"`{run.typed}`" if run.typed else "`isles train` with its run file"
        lines.append(f"  {typed} goes on with all of them")
    lines.append(f"  directory  {run.path}")
    return lines


def _hub_lines(report: SeveralReport) -> list[str]:
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
        state: str = found.state
        if state in ALIVE and (found.queue or found.phase not in (None, "training")):
            state += f": {found.queue or found.phase}"
        sent, received = outer.get("sent_bytes"), outer.get("received_bytes")
        # Seconds that averaging has taken, hidden behind steps or not.
        sync_s = (outer.get("exposed_s") or 0.0) + (outer.get("hidden_s") or 0.0)
        rows.append(
            (
                cluster.name,
                found.launcher,
                state,
                steps_text(found.step, found.total_steps),
                f"{found.loss:.4f}" if found.loss is not None else "-",
                format_count(found.tokens_per_second) if found.tokens_per_second else "-",
                _share(weights.get(cluster.name)),
                format_bytes(sent) if sent else "-",
                format_bytes(received) if received else "-",
                format_duration(sync_s) if sync_s else "-",
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
        below = [
            replace(found[c.name], name=f"  {found[c.name].name}")
            for c in run.clusters
            if c.name in found
        ]
        rows.append((run.started_at, [_whole(run, found), *below]))
    rows += [(report.begun_at or 0.0, [report]) for report in left]
    rows.sort(key=lambda row: row[0], reverse=True)
    return [report for _, group in rows for report in group]


def _whole(run: SeveralRun, found: dict[str, RunReport]) -> RunReport:
    """A run on several clusters as a row."""
    reports = list(found.values())
    ahead = max(reports, key=lambda r: r.step or 0, default=None)
    speeds = [r.tokens_per_second for r in reports if r.state == "running" and r.tokens_per_second]
    return RunReport(
        name=run.name,
        path=str(run.path),
        state=_state_of(found, run),
        step=ahead.step if ahead else None,
        total_steps=ahead.total_steps if ahead else None,
        loss=ahead.loss if ahead else None,
        tokens_per_second=sum(speeds) if speeds else None,
        eta_s=max((r.eta_s for r in reports if r.eta_s is not None), default=None),
        begun_at=run.started_at,
        host=f"{len(run.clusters)} clusters: {', '.join(c.name for c in run.clusters)}",
    )


def _state_of(reports: Mapping[str, RunReport], run: SeveralRun) -> ReportState:
    """The whole run in a word: what runs, else the worst of its clusters' ends."""
    states = [reports[c.name].state if c.name in reports else "new" for c in run.clusters]
    return next((state for state in _WORST_FIRST if state in states), "finished")


def end_lines(run: SeveralRun, codes: Mapping[str, int]) -> tuple[list[str], int]:
    """What is said at the end of following, and the exit code.

    Args:
        run: the run.
        codes: exit codes of the clusters that were followed.
    """
    reports = cluster_reports(run)
    state = _state_of(reports, run)
    is_half = state == "finished" and any(codes.values())
    lines = [f"{run.name} " + ("has ended" if is_half else _ENDS.get(state, f"is {state}"))]
    width = max(len(cluster.name) for cluster in run.clusters)
    for cluster in run.clusters:
        lines.append(f"  {cluster.name.ljust(width)}  {_end_text(reports.get(cluster.name))}")
    lines += _model_lines(run, reports)
    if state != "finished" and not any(r.state in ALIVE for r in reports.values()):
        typed = f"`{run.typed}`" if run.typed else "the same `isles train` command"
        lines.append(f"  {typed} goes on with all of them")
    return lines, worst(codes.values())


def worst(codes: Iterable[int]) -> int:
    """The exit code of all clusters together: a failure before a stop, and a stop before an end."""
    found = [code for code in codes if code]
    failures = [code for code in found if code not in (ExitCode.INTERRUPTED, ExitCode.REQUEUE)]
    return max(failures or found, default=ExitCode.OK)


def _end_text(report: RunReport | None) -> str:
    if report is None:
        return "was never started"
    step = f" at step {steps_text(report.step, report.total_steps)}" if report.step else ""
    reason = f": {report.reason}" if report.reason not in ("", report.state) else ""
    return f"{report.state}{step}{reason}"


def _model_lines(run: SeveralRun, reports: Mapping[str, RunReport]) -> list[str]:
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
    return int(outer.get("turn") or 0), str((outer.get("last_turn") or {}).get("digest"))

"""Multi-cluster runs: status, outcome, stopping.

Such a run is a parent whose children are the runs of its clusters. Each command works on all
children in parallel (`children.py`), and adds the report of the hub. `multi_cluster.py` starts the
children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isles.errors import ExitCode, UserError
from isles.facts.units import format_bytes, format_count, format_duration
from isles.launch.hub import end_hub, hub_process, local_line
from isles.monitor.children import ChildLine, run_all
from isles.monitor.outer import ask_status
from isles.monitor.remote import reports_of
from isles.monitor.status import ReportState, RunReport
from isles.monitor.table import cell, columns, steps_text
from isles.run.find import run_of, typed_name
from isles.run.join_line import JoinLine
from isles.run.owner import shown_only
from isles.run.remote import ClusterRun, MultiClusterRun, list_multi_cluster
from isles.run.state import number_of

ALIVE = ("running", "queued")

_WORST_FIRST: tuple[ReportState, ...] = (
    *("running", "queued", "unreachable", "unknown"),
    *("failed", "killed", "gone", "stopped", "new"),
)
_AWAY = ("failed", "killed", "unreachable", "gone")
_ANSWER_S = 4.0
_SLOW = 0.8
"""A cluster is called slow below this part of the fastest one's speed."""

_WAITED_S = 60.0
_ENDS = {
    "finished": "is finished",
    "stopped": "has stopped",
    "failed": "has failed",
    "killed": "was killed",
    "running": "still runs",
}

PrintLine = Callable[[str], object]


def cluster_reports(run: MultiClusterRun) -> dict[str, RunReport]:
    """Reports of the clusters that were started. isles queries all machines in parallel."""
    there = {c.name: found for c in run.clusters if (found := run_of(run, c)) is not None}
    reports = reports_of(list(there.values()), run.path.parent)
    return dict(zip(there, reports, strict=True))


def furthest(run: MultiClusterRun) -> str | None:
    """The cluster with a checkpoint that has taken in the most averages; None: none has one."""
    reports = cluster_reports(run)
    saved = [name for name, report in reports.items() if report.checkpoint_step is not None]
    return max(saved, key=lambda name: _version(reports[name])[0], default=None)


def place_of(cluster: ClusterRun) -> str:
    """Argument that names the run of a cluster on this machine."""
    return f"{cluster.ssh}:{cluster.path}" if cluster.ssh else cluster.path


def hub_line(run: MultiClusterRun) -> JoinLine:
    """The join line that connects this machine to the hub of a run.

    Raises:
        ConfigError: it is not known.
    """
    return JoinLine.read(run.join_file) if run.hub else local_line(run.state)


@dataclass(frozen=True, slots=True)
class MultiClusterReport:
    """A multi-cluster run at one moment.

    Args:
        clusters: reports of the started clusters, by name.
        hub: its answer to `/v1/status`, or None.
        hub_error: the reason if `hub` is None.
    """

    run: MultiClusterRun
    state: str
    clusters: dict[str, RunReport]
    hub: dict[str, Any] | None
    hub_error: str

    def record(self) -> dict[str, Any]:
        clusters = []
        for cluster in self.run.clusters:
            report = self.clusters.get(cluster.name)
            clusters.append({**asdict(cluster), "report": report.model_dump() if report else None})
        return {
            "name": self.run.name,
            "path": str(self.run.path),
            "state": self.state,
            "begun_at": self.run.begun_at,
            "started_at": self.run.started_at,
            "clusters": clusters,
            "hub": self.hub,
            "hub_error": self.hub_error,
        }

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        return {member["name"]: member for member in (self.hub or {}).get("members") or []}


def multi_cluster_report(run: MultiClusterRun) -> MultiClusterReport:
    """Ask the machines and the hub of a multi-cluster run."""
    reports = cluster_reports(run)
    answer, error = None, ""
    if run.meets and not run.hub and hub_process(run.state) is None:
        error = "it does not run"
    elif run.meets:
        try:
            answer = ask_status(hub_line(run), _ANSWER_S)
        except UserError as caught:
            error = f"{caught.what} ({caught.where})"
    elif run.engine == "bucket":
        # What the cluster knows that reads there now.
        found = [
            meeting
            for report in reports.values()
            if report.state in ALIVE and (meeting := (report.outer or {}).get("meeting"))
        ]
        answer = max(found, key=lambda meeting: meeting.get("round") or 0, default=None)
    return MultiClusterReport(run, _state_of(reports, run), reports, answer, error)


def multi_cluster_lines(report: MultiClusterReport) -> list[str]:
    run = report.run
    lines = [run.name, f"  state      {report.state}", *_hub_lines(report), ""]
    lines[2:2] = [f"  {shown_only(run.owner)}"] if run.owner else []
    lines += [f"  {text}" for text in (*columns(_rows(report)), *_remarks(report))]
    if report.state == "finished":
        lines += _model_lines(run, report.clusters)
    elif not any(r.state in ALIVE for r in report.clusters.values()):
        typed = f"`{run.typed}`" if run.typed else "`isles train` with its run file"
        lines.append(f"  {typed} resumes all of them")
    lines.append(f"  directory  {run.path}")
    return lines


def _hub_lines(report: MultiClusterReport) -> list[str]:
    if not report.run.meets:
        return _bucket_lines(report) or ["  hub        found by hivemind"]
    place = report.run.hub
    if not place:
        try:
            place = JoinLine.read(report.run.join_file).address
        except UserError:
            place = "this machine"
    answer = report.hub
    if answer is None:
        is_over = report.state in ("finished", "stopped", "failed", "killed")
        return [] if is_over else [f"  hub        at {place}: {report.hub_error}"]
    fragments = int(answer.get("fragments") or 0)
    parts = f" ({fragments} fragments)" if fragments > 1 else ""
    lines = [f"  hub        at {place}, round {answer.get('round')}{parts}"]
    lines += [f"  weight     {note}" for note in heavy_notes(answer)]
    return [*lines, *waiting_lines(answer)]


def heavy_notes(answer: Mapping[str, Any]) -> list[str]:
    """Note on a cluster that outweighs all others in the last average, by the answer of a hub."""
    found = answer.get("heavy")
    known = found if isinstance(found, dict) else {}
    name, share = known.get("name"), number_of(known, "share")
    if not isinstance(name, str) or share is None:
        return []
    return [
        f"{name} makes up {share:.1%} of the last average, by the tokens that it claims. If it is "
        "not that much larger than the others, throw it out (docs/security.md)"
    ]


def waiting_lines(answer: dict[str, Any]) -> list[str]:
    """Whom the open rounds wait for, by the answer of a hub."""
    lines = []
    for entry in answer.get("open") or []:
        missing = entry.get("missing") or {}
        names = [
            f"{name} ({missing[name]})" if missing.get(name) else name
            for name in entry.get("waits_for") or []
        ]
        if names and entry.get("contributed"):
            due = entry.get("due_in_s")
            by = f", for {format_duration(due)} more" if due is not None else ""
            lines.append(f"  waiting    round {entry['round']} waits for {', '.join(names)}{by}")
    return lines


def _bucket_lines(report: MultiClusterReport) -> list[str]:
    if report.run.engine != "bucket":
        return []
    url = dict(report.run.config.get("outer") or {}).get("url")
    here = {cluster.name for cluster in report.run.clusters}
    lines = [f"  bucket     {url}"]
    for name, member in report.members.items():
        if name not in here:  # of another run file, perhaps at another site
            heard = (
                f", last heartbeat {member['heard_s']:.0f}s ago"
                if member["state"] == "living"
                else ""
            )
            text = f"{name}, started elsewhere: {member['state']} at step {member['step']}{heard}"
            lines.append(f"  cluster    {text}")
    return [*lines, *waiting_lines(report.hub or {})]


def _rows(report: MultiClusterReport) -> list[tuple[str, ...]]:
    head = ("cluster", "launcher", "state", "step", "loss", "tokens/s", "weight", "up", "down")
    rows: list[tuple[str, ...]] = [(*head, "sync", "hidden", "last seen")]
    # Weights of the last average that any cluster has taken in.
    outers = [r.outer or {} for r in report.clusters.values()]
    averages = [average for outer in outers if (average := outer.get("last_outer_step"))]
    newest = max(averages, key=lambda average: average.get("outer_step") or 0, default=None)
    tokens = (newest or {}).get("weights") or {}
    whole = sum(tokens.values()) or 1
    for cluster in report.run.clusters:
        found, member = report.clusters.get(cluster.name), report.members.get(cluster.name)
        if found is None:
            rows.append((cluster.name, cluster.launcher, "never started", *("-",) * 9))
            continue
        outer, is_alive = found.outer or {}, found.state in ALIVE
        state: str = found.state
        if is_alive and (found.queue or found.phase not in (None, "training")):
            state += f": {found.queue or found.phase}"
        # Seconds that averaging has taken, hidden behind steps or not.
        sync_s = (outer.get("exposed_s") or 0.0) + (outer.get("hidden_s") or 0.0)
        cells = (
            cell(found.loss, "{:.4f}".format),
            cell(found.tokens_per_second or None, format_count),
            cell(tokens.get(cluster.name), lambda own: f"{own / whole:.0%}"),
            cell(outer.get("sent_bytes") or None, format_bytes),
            cell(outer.get("received_bytes") or None, format_bytes),
            cell(sync_s or None, format_duration),
            cell(outer.get("hidden_share"), "{:.0%}".format),
            cell(member if is_alive else None, lambda own: f"{own['heard_s']:.0f}s ago"),
        )
        steps = steps_text(found.step, found.total_steps)
        rows.append((cluster.name, found.launcher, state, steps, *cells))
    return rows


def _remarks(report: MultiClusterReport) -> list[str]:
    # Which clusters are slow, behind, or away, and why.
    lines = []
    running = [r for r in report.clusters.values() if r.state == "running"]
    fastest = max((r.tokens_per_second or 0.0 for r in running), default=0.0)
    for name, found in report.clusters.items():
        outer, member = found.outer or {}, report.members.get(name)
        if found.state == "queued":
            lines.append(f"{name} waits in its queue; the others train and average without it")
        elif found.state in _AWAY and report.state != found.state:
            lines.append(f"{name}: {found.reason or found.state}; {found.hint}".rstrip("; "))
        if found.state != "running":
            continue
        if outer and not outer.get("is_connected", True):
            places = {"hub": "the hub", "bucket": "the bucket"}
            whom = places.get(report.run.engine, "the others")
            lines.append(f"{name} does not reach {whom}, and trains on alone")
        elif outer.get("is_behind") or (member and member["is_behind"]):
            lines.append(f"{name} is behind, and takes the weights of another")
        elif member and member["state"] not in ("living", "finished"):
            seen = f"last seen {member['heard_s']:.0f}s ago"
            lines.append(f"{name} is in no round: {member['state']}, {seen}")
        lines += [f"{name}: {text}" for text in found.hangs]
        if found.tokens_per_second and found.tokens_per_second < _SLOW * fastest:
            own, best = format_count(found.tokens_per_second), format_count(fastest)
            lines.append(f"{name}: computes {own} tokens/s, the fastest {best}")
        exposed_s = outer.get("exposed_s") or 0.0
        if exposed_s > max(_WAITED_S, outer.get("hidden_s") or 0.0):
            waited = format_duration(exposed_s)
            lines.append(f"{name}: has waited {waited} for averages, without a step")
        if member and member.get("refused"):
            lines.append(f"{name}: {member['refused']}")
    return lines


def group_by_run(reports: Sequence[RunReport], output_dir: Path) -> list[RunReport]:
    """Rows of the table of all runs. Each cluster has a row below the row of its run.

    Args:
        reports: of all runs, the newest first.
        output_dir: where runs are.
    """
    left, rows = list(reports), []
    for run in reversed(list_multi_cluster(output_dir)):
        found: dict[str, RunReport] = {}
        for cluster in run.clusters:
            for report in left:
                # A folder that another machine shares with this one is seen here.
                if report.path == cluster.path and report.on in ("", cluster.ssh):
                    found[cluster.name] = report
        left = [report for report in left if report not in found.values()]
        below = [
            found[c.name].model_copy(update={"name": f"  {found[c.name].name}"})
            for c in run.clusters
            if c.name in found
        ]
        rows.append((run.started_at, [_sum_report(run, found), *below]))
    rows += [(report.begun_at or 0.0, [report]) for report in left]
    rows.sort(key=lambda row: row[0], reverse=True)
    return [report for _, group in rows for report in group]


def _sum_report(run: MultiClusterRun, found: dict[str, RunReport]) -> RunReport:
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


def _state_of(reports: Mapping[str, RunReport], run: MultiClusterRun) -> ReportState:
    return worst_state(
        [reports[c.name].state if c.name in reports else "new" for c in run.clusters]
    )


def worst_state(states: Sequence[str]) -> ReportState:
    """Running if any cluster runs; else the worst outcome of any."""
    return next((state for state in _WORST_FIRST if state in states), "finished")


def outcome_lines(run: MultiClusterRun, codes: Mapping[str, int]) -> tuple[list[str], int]:
    """The outcome of a run that was followed, as it is printed, and the exit code.

    Args:
        codes: exit codes of the clusters.
    """
    reports = cluster_reports(run)
    state = _state_of(reports, run)
    is_half = state == "finished" and any(codes.values())
    lines = [f"{run.name} " + ("has ended" if is_half else _ENDS.get(state, f"is {state}"))]
    width = max(len(cluster.name) for cluster in run.clusters)
    for cluster in run.clusters:
        report = reports.get(cluster.name)
        text = "was never started"
        if report is not None:
            step = f" at step {steps_text(report.step, report.total_steps)}" if report.step else ""
            reason = f": {report.reason}" if report.reason not in ("", report.state) else ""
            text = f"{report.state}{step}{reason}"
        lines.append(f"  {cluster.name.ljust(width)}  {text}")
    lines += _model_lines(run, reports)
    if state != "finished" and not any(r.state in ALIVE for r in reports.values()):
        typed = f"`{run.typed}`" if run.typed else "the same `isles train` command"
        lines.append(f"  {typed} resumes all of them")
    return lines, worst(codes.values())


def worst(codes: Iterable[int]) -> int:
    """The exit code for all clusters: a failure comes before a stop, and a stop before success."""
    found = [code for code in codes if code]
    failures = [code for code in found if code not in (ExitCode.INTERRUPTED, ExitCode.REQUEUE)]
    return max(failures or found, default=ExitCode.OK)


def _model_lines(run: MultiClusterRun, reports: Mapping[str, RunReport]) -> list[str]:
    # Clusters that have taken in the same averages hold the same weights.
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
        pair = done[name], done[newest]
        if _version(pair[0]) != _version(pair[1]):
            word = "OTHER weights, of fewer rounds"
        elif all((report.outer or {}).get("is_averaged") for report in pair):
            word = "the same weights"
        else:
            word = "OTHER weights, trained on since the last round"
        lines.append(f"  {word:<11} {place}")
    return [*lines, f'  next        isles generate {typed_name(run)} --prompt "Once"']


def _version(report: RunReport) -> tuple[int, str]:
    # How many averages a cluster has taken in, and the digest of the last.
    outer = report.outer or {}
    return int(outer.get("outer_step") or 0), str(
        (outer.get("last_outer_step") or {}).get("digest")
    )


def stop_clusters(
    run: MultiClusterRun, *, now: bool, timeout: str, print_line: PrintLine, warn: PrintLine
) -> int:
    """Stop all clusters of a run in parallel, then their hub.

    Returns:
        0 if no part of the run is alive. Otherwise the highest exit code of the stops.
    """
    run.require_own("stop the runs that it names")
    words = ["--now"] if now else []
    words += [f"--timeout={timeout}", f"--output-dir={run.path.parent}"]
    width = max(len(cluster.name) for cluster in run.clusters)

    def show(line: ChildLine) -> None:
        if line.kind != "end":
            (print_line if line.kind == "out" else warn)(f"{line.child.ljust(width)} | {line.text}")

    commands = {c.name: ["stop", place_of(c), *words] for c in run.clusters if c.path}
    ended = run_all(commands, doing="stopping", print_line=print_line, show=show)
    code = max((end.code for end in ended.values()), default=ExitCode.OK)
    if code and run.meets:
        print_line("the hub continues for the clusters that run")
    elif run.meets and not run.hub and end_hub(run.state):
        print_line(f"{run.name} has stopped, and its hub has ended")
    elif not code:
        print_line(f"{run.name} has stopped")
    return code

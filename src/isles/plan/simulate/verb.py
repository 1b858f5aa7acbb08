"""`isles plan RUN_FILE --simulate`: simulate a run, and print tables and a timeline."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from isles.config.load import Loaded
from isles.errors import ExitCode, MissingDependencyError, UserError
from isles.facts.console import Console
from isles.facts.units import format_bytes, format_count, format_duration, plural
from isles.plan.simulate.engine import settled, simulate
from isles.plan.simulate.fleet import Planned, fleet_of, load_fleet
from isles.plan.simulate.result import Result, Span
from isles.plan.simulate.setting import SimulationSettings, setting_of

DAY_H = 24.0
"""Simulated hours, if neither --hours nor max_steps is set."""
SIGNS = {
    "compute": "█",
    "outer": "▓",
    "wait": "░",
    "down": "x",
    "joining": "+",
    "queue": "q",
    "away": " ",
    "done": "·",
}
"""Sign of a column of the timeline, by the state with the largest share."""
_CAUSES = ("others", "transfer", "outer", "down", "joining", "queue", "away")
MEANINGS = {
    "others": "waiting for slower or lost clusters",
    "transfer": "waiting for links and hub",
    "outer": "encoding and applying",
    "down": "failed, disconnected or frozen",
    "joining": "fetching state or missed averages",
    "queue": "waiting in a queue",
    "away": "not there",
}
_WIDTH = 72
_OUTER_STEPS = 4
"""Outer steps in the timeline: those in the middle of the run …"""
_KEPT = 600
"""… or the oldest with known times."""


def simulate_run(
    loaded: Loaded,
    fleet_path: Path | None,
    hours: float | None,
    seed: int,
    planned: Mapping[str, Planned] | None = None,
    *,
    as_json: bool,
    png: Path | None,
    print_line: Callable[[str], None],
) -> int:
    """Simulate a run, and print its figures.

    Args:
        fleet_path: fleet file. If omitted, the clusters of the run file, with printed assumptions.
        planned: see `fleet_of`.
        hours: limit of the virtual clock. If omitted, until the run's last step, or a day.
        png: file for a picture of the timeline.

    Raises:
        UserError: the run has no outer steps, or the fleet file has issues.
    """
    if hours is not None and not 0 < hours <= 100_000:
        fix = "use a number above 0 and up to 100000"
        raise UserError(f"{hours:g} hours cannot be simulated", where="--hours", fix=fix)
    if png is not None and find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "--png needs the package matplotlib, which is not installed",
            where="--png",
            fix="pip install matplotlib, or remove --png and use the timeline in the terminal",
        )
    if png is not None and not png.absolute().parent.is_dir():
        raise UserError(
            f"folder not found: {png.absolute().parent}",
            where="--png",
            fix="create it, or use another folder",
        )
    notes: list[str] = []
    if fleet_path is None:
        setting = setting_of(loaded)
        fleet, notes = fleet_of(loaded, setting, planned)
    else:
        fleet = load_fleet(fleet_path)
        setting = setting_of(loaded, parameters=fleet.parameters)
    setting = settled(fleet, setting)
    if hours is None and setting.max_steps is None:
        hours = DAY_H
    result = simulate(fleet, setting, hours=hours, seed=seed)
    if as_json:
        print_line(json.dumps(result.figures() | {"assumed": notes}))
    else:
        print_line(report(setting, result, notes))
    if png is not None:
        _draw(result, png)
    return ExitCode.OK


def _draw(result: Result, path: Path) -> None:
    # In a separate process: this package does not import matplotlib.
    begin, end = window(result)
    rows = [
        {"name": name, "spans": [asdict(span) for span in spans if span.end > begin]}
        for name, spans in result.timeline
    ]
    picture = {"rows": rows, "commits": result.commits, "begin": begin, "end": end}
    command = [sys.executable, "-m", "isles.track.timeline", str(path)]
    done = subprocess.run(
        command, input=json.dumps(picture), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise UserError(
            f"the picture cannot be written: {done.stderr.strip().splitlines()[-1][:200]}",
            where=str(path),
            fix="use another file for --png",
        )


def report(setting: SimulationSettings, result: Result, notes: Sequence[str]) -> str:
    """The whole text of `isles plan --simulate`."""
    lines = [
        *_head(setting, result),
        *(f"  assumed: {note}" for note in notes),
        "",
        _table_text(_groups(result)),
        "",
        _hub(setting, result),
        "",
        *timeline(result),
    ]
    return "\n".join(lines)


def _head(setting: SimulationSettings, result: Result) -> list[str]:
    days = result.seconds / 86400
    time = f"{days:.2g} days" if days >= 1 else format_duration(result.seconds)
    num = result.num_clusters
    received = sum(group.received_bytes for group in result.groups) / num
    sent = sum(group.sent_bytes for group in result.groups) / num
    stale = max((group.most_stale for group in result.groups), default=0)
    codec = setting.codec.kind
    return [
        f"{setting.name}: {plural(num, 'cluster')}, {format_count(setting.parameters)} parameters, "
        f"sync_every {result.sync_every}, fragments {setting.num_fragments}, "
        f"delay {setting.delay}, codec {codec}",
        f"  simulated    {format_duration(result.seconds)}, {len(result.commits)} outer steps",
        f"  goodput      {result.goodput:.1%} of the fleet's compute ends up in the model",
        f"  outer step   {result.usual_outer_s:.1f} s from its first contribution to its average",
        f"  a round has  {result.steps_per_round:.0f} inner steps of each cluster, on average",
        f"  staleness    {result.stale_steps:.1f} inner steps from contribution to average, "
        f"{stale} at most",
        f"  each sends   {format_bytes(sent)}, fetches {format_bytes(received)}, in {time}",
    ]


def _table_text(table: Table) -> str:
    stream = io.StringIO()
    Console(file=stream, width=140).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _groups(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("group", no_wrap=True)
    causes = [cause for cause in _CAUSES if any(g.shares[cause] >= 5e-4 for g in result.groups)]
    columns = ("clusters", "step", "goodput", "compute", *causes, "lost", "failures", "late")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for group in result.groups:
        lost = group.steps_lost / group.steps_done if group.steps_done else 0.0
        table.add_row(
            group.name,
            str(group.count),
            f"{group.step_s:.3g} s",
            f"{group.goodput:.1%}",
            f"{group.shares['compute']:.1%}",
            *(f"{group.shares[cause]:.1%}" for cause in causes),
            f"{lost:.1%}",
            str(group.num_failures),
            str(group.late),
        )
    shown = "; ".join(f"{cause}: {MEANINGS[cause]}" for cause in causes)
    table.caption = f"{shown}. lost: steps that a failure has undone." if shown else ""
    table.caption_justify = "left"
    return table


def _hub(setting: SimulationSettings, result: Result) -> str:
    fragments = range(setting.num_fragments)
    stored = result.num_clusters * max(map(setting.contribution_bytes, fragments))
    return (
        f"hub: downlink busy {result.hub_in_busy:.0%}, uplink {result.hub_out_busy:.0%} of the "
        f"time, received {format_bytes(result.hub_received_bytes)}, "
        f"sent {format_bytes(result.hub_sent_bytes)}, "
        f"stores {format_bytes(stored)} per outer step"
    )


def timeline(result: Result) -> list[str]:
    """Timeline of some outer steps: a row for each shown cluster, and the commits."""
    if not result.timeline or not result.commits:
        return []
    begin, end = window(result)
    shown = ", ".join(
        f"{SIGNS[state]} {word}"
        for state, word in (
            ("compute", "compute"),
            ("outer", "encode, apply"),
            ("wait", "wait"),
            ("down", "down"),
            ("joining", "joining"),
        )
    )
    lines = [f"from {begin:.0f} s to {end:.0f} s: {shown}, ^ a new average"]
    for name, spans in result.timeline:
        lines.append(f"{name[:14]:>14} {_row(spans, begin, end)}")
    marks = [" "] * _WIDTH
    for at in result.commits:
        if begin <= at <= end:
            marks[min(_WIDTH - 1, int((at - begin) / (end - begin) * _WIDTH))] = "^"
    return [*lines, f"{'':>14} {''.join(marks).rstrip()}"]


def window(result: Result) -> tuple[float, float]:
    """Start and end of the timeline, in seconds."""
    commits = result.commits
    last = min(len(commits) - 1, max(_OUTER_STEPS, len(commits) // 2, len(commits) - _KEPT))
    begin = commits[last - _OUTER_STEPS] if last >= _OUTER_STEPS else 0.0
    return begin, commits[last] + 0.02 * (commits[last] - begin)


def _row(spans: Iterable[Span], begin: float, end: float) -> str:
    width_s = (end - begin) / _WIDTH
    columns: list[dict[str, float]] = [{} for _ in range(_WIDTH)]
    for span in spans:
        first = max(0, int((span.begin - begin) / width_s))
        last = min(_WIDTH - 1, int((span.end - begin) / width_s))
        for index in range(first, last + 1):
            left = max(span.begin, begin + index * width_s)
            right = min(span.end, begin + (index + 1) * width_s)
            if right > left:
                column = columns[index]
                column[span.state] = column.get(span.state, 0.0) + right - left
    return "".join(SIGNS[max(c, key=lambda state: c[state])] if c else " " for c in columns)

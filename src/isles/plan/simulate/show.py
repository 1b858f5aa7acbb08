"""A simulated run for people: tables, and what each cluster did over time, as a picture."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from isles.facts.units import format_bytes, format_count, format_duration
from isles.plan.simulate.capacity import Capacity
from isles.plan.simulate.fleet import FleetConfig
from isles.plan.simulate.result import Result, Span
from isles.plan.simulate.search import Found
from isles.plan.simulate.setting import Setting

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
"""One column of the picture, by what most of it was."""
_CAUSES = ("others", "transfer", "outer", "down", "joining", "queue", "away")
MEANINGS = {
    "others": "waits for slower or lost clusters",
    "transfer": "waits for links and hub",
    "outer": "encodes and applies",
    "down": "failed, cut off or frozen",
    "joining": "takes state or missed averages",
    "queue": "waits in a queue",
    "away": "not there",
}
_WIDTH = 72
_OUTER_STEPS = 4
"""So many outer steps are in the picture: those in the middle of the run …"""
_KEPT = 600
"""… or the oldest whose times are kept."""


def report(
    fleet: FleetConfig,
    setting: Setting,
    result: Result,
    limits: Capacity,
    found: Found | None,
    notes: Sequence[str],
) -> str:
    """All that `isles plan --simulate` prints."""
    parts = [
        *_head(setting, result),
        *(f"  assumed: {note}" for note in notes),
        "",
        _table_text(_groups(result)),
        "",
        *_hub(fleet, setting, result, limits),
        "",
        *timeline(result),
    ]
    if found is not None:
        parts += ["", *_found(found)]
    return "\n".join(parts)


def _head(setting: Setting, result: Result) -> list[str]:
    days = result.seconds / 86400
    num = result.num_clusters
    received = sum(group.received_bytes for group in result.groups) / num
    sent = sum(group.sent_bytes for group in result.groups) / num
    stale = max((group.most_stale for group in result.groups), default=0)
    codec = setting.codec.kind
    return [
        f"{setting.name}: {num} clusters, {format_count(setting.parameters)} parameters, "
        f"sync_every {result.sync_every}, fragments {setting.num_fragments}, "
        f"delay {setting.delay}, codec {codec}",
        f"  simulated    {format_duration(result.seconds)}, {len(result.commits)} outer steps",
        f"  goodput      {result.goodput:.1%} of the fleet's compute ends up in the model",
        f"  outer step   {result.usual_outer_s:.1f} s from its first contribution to its average",
        f"  a round has  {result.steps_per_round:.0f} inner steps of each cluster, on average",
        f"  staleness    {result.stale_steps:.1f} inner steps from contribution to average, "
        f"{stale} at most",
        f"  each sends   {format_bytes(sent)}, and fetches {format_bytes(received)}, "
        f"in {days:.2g} days",
    ]


def _table_text(table: Table) -> str:
    stream = io.StringIO()
    Console(file=stream, width=140, highlight=False).print(table)
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
    table.caption = f"{shown}. lost: steps whose weights a failure took." if shown else ""
    table.caption_justify = "left"
    return table


def _hub(fleet: FleetConfig, setting: Setting, result: Result, limits: Capacity) -> list[str]:
    num = result.num_clusters
    lines = [
        f"hub: downlink busy {result.hub_in_busy:.0%}, uplink {result.hub_out_busy:.0%} of the "
        f"time; received {format_bytes(result.hub_received_bytes)}, "
        f"sent {format_bytes(result.hub_sent_bytes)}; "
        f"{format_bytes(limits.disk_bytes)} on its disk for an outer step",
        f"  one hub carries {limits.first.clusters} of these clusters; the first limit is "
        f"{limits.first.what}. Further limits:",
    ]
    lines += [f"    {limit.clusters:>9}  {limit.what}" for limit in limits.limits[1:]]
    if num > limits.first.clusters and fleet.hub.hubs == 1:
        lines.append(
            f"  WARNING: one hub does not carry {num} clusters. On paper (isles has no second "
            f"level today) {limits.hubs} hubs below a root would: try hub.hubs: "
            f"{limits.hubs} in the fleet file"
        )
    if limits.hubs > 1:
        lines.append(
            f"  a second level, on paper, carries {limits.two_levels} clusters; with "
            f"{limits.hubs} hubs it adds {limits.root_s:.1f} s to an outer step"
        )
    return lines


def timeline(result: Result) -> list[str]:
    """Some outer steps: a row for each cluster that is shown, and the commits."""
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
    lines = [f"from {begin:.0f} s to {end:.0f} s: {shown}, ^ an average is there"]
    for name, spans in result.timeline:
        lines.append(f"{name[:14]:>14} {_row(spans, begin, end)}")
    marks = [" "] * _WIDTH
    for at in result.commits:
        if begin <= at <= end:
            marks[min(_WIDTH - 1, int((at - begin) / (end - begin) * _WIDTH))] = "^"
    return [*lines, f"{'':>14} {''.join(marks).rstrip()}"]


def window(result: Result) -> tuple[float, float]:
    """Seconds from which and to which the picture goes."""
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


def _found(found: Found) -> list[str]:
    lines = [
        f"other settings, where nothing fails and no round is longer than sync_every (now: "
        f"{found.now:.1%}); * brings as much as the best, and learns best:"
    ]
    for key in dict.fromkeys(trial.key for trial in found.trials):
        own = [trial for trial in found.trials if trial.key == key]
        values = ", ".join(f"{t.value}{'*' if t.is_best else ''} {t.goodput:.1%}" for t in own)
        lines.append(f"  {key:<10} {values}")
    if found.together:
        lines.append(f"  together: outer: {{{found.together}}} brings {found.goodput:.1%}")
    else:
        lines.append("  together: no sync_every up to 2000 is long enough; the links are too slow")
    return lines

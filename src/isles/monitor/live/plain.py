"""A snapshot as lines of text, where there is no terminal to draw on."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from isles.facts.units import format_count, format_duration, printable
from isles.monitor.live.cells import (
    BAR,
    CLUSTER_COLUMNS,
    HOST_COLUMNS,
    LINK_COLUMNS,
    RANK_COLUMNS,
    Column,
    R,
    hub_line,
)
from isles.monitor.live.model import Head, Snapshot
from isles.monitor.table import cell, columns, steps_text

# What fits on a line of 80.
_OF_CLUSTERS = ("cluster", "mark", "state", "step", "outer", "weight", "hidden", "up", "down")
_OF_HOSTS = ("cluster", "host", "mark", "state", "cpu", "now/of GiB", "in", "out", "heard")
_OF_RANKS = ("cluster", "rank", "mark", "host", "use", "now/peak/of GiB", BAR, "°C", "step")
_OF_LINKS = ("cluster", "from", "to", "used", "measured", "by", "round trip", "state")

LIVE = "`isles top` is live in a terminal; `isles dashboard` is a page"


def plain_lines(snapshot: Snapshot, width: int = 80) -> list[str]:
    """A snapshot as text; no line is longer than `width`."""
    lines = _head_lines(snapshot.run)
    lines += [hub_line(snapshot.hub)] if snapshot.hub is not None else []
    lines += [f"! {note}" for note in snapshot.notes]
    tables = (
        _table(CLUSTER_COLUMNS, _OF_CLUSTERS, snapshot.clusters),
        _table(HOST_COLUMNS, _OF_HOSTS, snapshot.hosts),
        _table(RANK_COLUMNS, _OF_RANKS, snapshot.ranks),
        _table(LINK_COLUMNS, _OF_LINKS, snapshot.links),
    )
    found = []
    for line in lines:
        found += textwrap.wrap(line, width, subsequent_indent="  ") or [""]
    for table in tables:
        if table:
            found += ["", *(_cut(line, width) for line in columns(table))]
    return [printable(line) for line in [*found, "", _cut(LIVE, width)]]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _head_lines(run: Head) -> list[str]:
    state = f"{run.state}: {run.phase}" if run.phase else run.state
    steps = f"step {steps_text(run.step, run.total_steps)}" if run.step is not None else ""
    left = f"{format_duration(run.left_s)} left" if run.left_s is not None else ""
    figures = [
        cell(run.loss, "loss {:.4f}".format),
        cell(run.tokens_per_second or None, lambda v: f"{format_count(v)} tokens/s"),
        cell(run.mfu, "MFU {:.0%}".format),
        cell(run.goodput, "goodput {:.0%}".format),
    ]
    saved = ""
    if run.saved_step is not None:
        saved = f"saved step {run.saved_step}"
        saved += cell(run.saved_age_s, lambda s: f", {format_duration(s)} ago").replace("-", "")
    more = [run.reason if run.reason != run.state else "", saved]
    if run.restarts:
        more.append(f"restarts {run.restarts}; the last: {run.last_restart}".rstrip(": "))
    first = "  ".join(part for part in (run.name, state, steps, left) if part)
    known = " · ".join(figure for figure in figures if figure != "-")
    return [line for line in (first, known, *more) if line]


def _table(
    columns: Sequence[Column[R]], heads: Sequence[str], rows: Sequence[R]
) -> list[tuple[str, ...]]:
    # The columns of these heads in which a row has something.
    shown = list[tuple[str, ...]]()
    for column in columns:
        cells: list[str] = [column.text(row) for row in rows]
        if column.head in heads and set(cells) - {"", "-"}:
            shown.append((column.head, *cells))
    return list(zip(*shown, strict=True))

"""A snapshot as lines of text, where there is no terminal to draw on."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from isles.facts.units import format_bytes, format_count, format_duration, printable
from isles.monitor.live.model import ClusterRow, Head, HostRow, HubRow, LinkRow, RankRow, Snapshot
from isles.monitor.table import cell, columns, steps_text

LIVE = "`isles top` is live in a terminal; `isles dashboard` is a page"


def plain_lines(snapshot: Snapshot, width: int = 80) -> list[str]:
    """A snapshot as text; no line is longer than `width`."""
    lines = [*_head_lines(snapshot.run), *_hub_lines(snapshot.hub)]
    lines += [f"! {note}" for note in snapshot.notes]
    has_clusters = bool(snapshot.clusters)
    tables = (
        _clusters(snapshot.clusters),
        _hosts(snapshot.hosts, has_clusters=has_clusters),
        _ranks(snapshot.ranks, has_clusters=has_clusters),
        _links(snapshot.links),
    )
    found = []
    for line in lines:
        found += textwrap.wrap(line, width, subsequent_indent="  ") or [""]
    for table in tables:
        if len(table) > 1:
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


def _hub_lines(hub: HubRow | None) -> list[str]:
    if hub is None:
        return []
    if hub.error:
        return [f"hub {hub.address}: {hub.error}".replace(" :", ":")]
    waits = f", waits for {', '.join(hub.waits_for)}" if hub.waits_for else ""
    return [f"hub {hub.address}{cell(hub.round, ', round {}'.format).strip('-')}{waits}"]


def _clusters(rows: Sequence[ClusterRow]) -> list[tuple[str, ...]]:
    head = ("cluster", "state", "step", "tokens/s", "outer", "weight", "up", "down", "hidden")
    return [
        head,
        *(
            (
                row.name,
                row.mark or row.state,
                steps_text(row.step, row.total_steps),
                cell(row.tokens_per_second or None, format_count),
                cell(row.outer_step, str),
                cell(row.weight, "{:.0%}".format),
                cell(row.up_bytes or None, format_bytes),
                cell(row.down_bytes or None, format_bytes),
                cell(row.hidden_share, "{:.0%}".format),
            )
            for row in rows
        ),
    ]


def _hosts(rows: Sequence[HostRow], *, has_clusters: bool) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("host", "ranks", "cpu", "memory", "disk free", "in", "out", "heard", "state")
    ]
    for row in rows:
        ranks = "-"
        if row.ranks is not None:
            first, last = row.ranks
            ranks = f"{first}-{last}" if last > first else str(first)
        name = f"{row.cluster}/{row.host}" if has_clusters and row.cluster else row.host
        table.append(
            (
                name or "-",
                ranks,
                cell(row.cpu, "{:.0%}".format),
                cell(row.memory_bytes, format_bytes),
                cell(row.disk_free_bytes, format_bytes),
                _rate(row.net_in),
                _rate(row.net_out),
                cell(row.heard_s, format_duration),
                row.mark or row.state,
            )
        )
    return table


def _ranks(rows: Sequence[RankRow], *, has_clusters: bool) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("rank", "host", "step", "use", "memory", "°C", "W", "data/comp/comm/wait", "mark")
    ]
    for row in rows:
        parts = "-"
        if row.parts is not None:
            own = row.parts
            rest_s = max(0.0, own.communication_s - own.waiting_s)
            seconds = (own.data_s, own.compute_s, rest_s, own.waiting_s)
            whole = sum(seconds) or 1.0
            parts = "/".join(f"{part / whole:.0%}" for part in seconds)
        rank = f"{row.cluster}/{row.rank}" if has_clusters and row.cluster else str(row.rank)
        table.append(
            (
                rank,
                row.host,
                cell(row.step, str),
                cell(row.use, "{:.0%}".format),
                cell(row.memory_bytes, format_bytes),
                cell(row.temperature_c, "{:.0f}".format),
                cell(row.power_w, "{:.0f}".format),
                parts,
                f"{row.mark}: {row.throttle}" if row.mark == "throttled" else row.mark,
            )
        )
    return table


def _links(rows: Sequence[LinkRow]) -> list[tuple[str, ...]]:
    return [
        ("link", "measured", "by", "round trip", "used", "state"),
        *(
            (
                f"{row.source} > {row.target}",
                _rate(row.measured),
                row.measured_by or "-",
                cell(row.rtt_s, lambda s: f"{1e3 * s:.1f} ms"),
                _rate(row.used),
                row.state,
            )
            for row in rows
        ),
    ]


def _rate(bytes_per_s: float | None) -> str:
    return cell(bytes_per_s, lambda rate: f"{format_bytes(rate)}/s")

"""Columns of the tables of `isles top`, each figure a word of text; and a snapshot as such lines.

isles prints the lines if the output is not a terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from isles.facts.units import format_bytes, format_count, format_duration, printable
from isles.monitor.live.model import ClusterRow, Head, HostRow, HubRow, LinkRow, RankRow, Snapshot
from isles.monitor.table import cell, columns, steps_text

Row = RankRow | HostRow | LinkRow | ClusterRow
Value = float | str | None
R = TypeVar("R", RankRow, HostRow, LinkRow, ClusterRow)


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column of a table.

    Args:
        get: the value that its rows are sorted by; None comes last.
        is_fixed: it stays where the others move to the left.
    """

    head: str
    get: Callable[[R], Value]
    text: Callable[[R], str]
    is_words: bool = False
    is_fixed: bool = False


def _words(head: str, get: Callable[[R], str], *, is_fixed: bool = False) -> Column[R]:
    return Column(head, get, lambda row: printable(get(row), keep=""), True, is_fixed)


def _number(
    head: str,
    get: Callable[[R], float | None],
    form: Callable[[float], str],
    *,
    is_fixed: bool = False,
) -> Column[R]:
    def text(row: R) -> str:
        value = get(row)
        return "-" if value is None else form(value)

    return Column(head, get, text, False, is_fixed)


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if abs(value) < 10 else format_duration(value)


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= scale:
            return f"{bits / scale:.1f} {unit}"
    return f"{bits:.0f} bit/s"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def parts_of(row: RankRow) -> tuple[float, float, float, float] | None:
    """Seconds of the last timed step for data, compute, communication itself, and waiting."""
    if (parts := row.parts) is None:
        return None
    own = max(0.0, parts.communication_s - parts.waiting_s)
    return parts.data_s, parts.compute_s, own, parts.waiting_s


def step_s(row: RankRow) -> float | None:
    parts = parts_of(row)
    return sum(parts) if parts else None


def _rows(row: RankRow) -> str:
    given = ("-" if value is None else str(value) for value in (row.rows, row.micro_batch))
    return "-" if row.rows is row.micro_batch is None else "×".join(given)


def _span(ranks: tuple[int, int] | None) -> str:
    return (
        "-" if ranks is None else "{}-{}".format(*ranks) if ranks[0] < ranks[1] else f"{ranks[0]}"
    )


def _parts_text(row: RankRow) -> str:
    # Where a bar cannot be drawn: shares of data, compute, communication and waiting.
    if (parts := parts_of(row)) is None:
        return "-"
    whole = sum(parts) or 1.0
    return "/".join(_percent(part / whole) for part in parts)


BAR = "parts"
RANK_COLUMNS: tuple[Column[RankRow], ...] = (
    _words("cluster", lambda r: r.cluster, is_fixed=True),
    _number("rank", lambda r: r.rank, _whole, is_fixed=True),
    _words("mark", lambda r: r.mark, is_fixed=True),
    _words("host", lambda r: r.host),
    _number("use", lambda r: r.use, _percent),
    Column(
        "now/peak/of GiB",
        lambda r: r.memory_bytes,
        lambda r: "/".join(map(_gib, (r.memory_bytes, r.peak_bytes, r.limit_bytes))),
    ),
    Column(BAR, lambda r: parts[1] if (parts := parts_of(r)) else None, _parts_text),
    _number("heard", lambda r: r.heard_s, format_duration),
    _number("°C", lambda r: r.temperature_c, _whole),
    _number("W", lambda r: r.power_w, _whole),
    Column("rows", lambda r: r.rows, _rows),
    _number("step", lambda r: r.step, _whole),
    _number("took", step_s, _seconds),
    _words("does", lambda r: r.stage),
    _number("for", lambda r: r.stage_s, format_duration),
    _words("device", lambda r: r.device.removeprefix("NVIDIA ")),
    _words("slowed by", lambda r: r.throttle),
    _number("MHz", lambda r: r.clock_mhz, _whole),
    _number("pid", lambda r: r.pid, _whole),
    _words("note", lambda r: r.note),
)
HOST_COLUMNS: tuple[Column[HostRow], ...] = (
    _words("cluster", lambda r: r.cluster, is_fixed=True),
    _number("node", lambda r: r.node, _whole, is_fixed=True),
    _words("mark", lambda r: r.mark, is_fixed=True),
    _words("host", lambda r: r.host, is_fixed=True),
    Column("ranks", lambda r: r.ranks[0] if r.ranks else None, lambda r: _span(r.ranks)),
    _words("state", lambda r: r.state),
    _number("cpu", lambda r: r.cpu, _percent),
    Column(
        "now/of GiB",
        lambda r: r.memory_bytes,
        lambda r: "/".join(map(_gib, (r.memory_bytes, r.memory_total_bytes))),
    ),
    _number("in", lambda r: r.net_in, _rate),
    _number("out", lambda r: r.net_out, _rate),
    _number("heard", lambda r: r.heard_s, format_duration),
    _number("disk free", lambda r: r.disk_free_bytes, format_bytes),
    _number("clock", lambda r: r.skew_s, "{:+.3f}s".format),
    _words("address", lambda r: r.address),
    _words("note", lambda r: r.note),
)
LINK_COLUMNS: tuple[Column[LinkRow], ...] = (
    _words("cluster", lambda r: r.cluster, is_fixed=True),
    _words("from", lambda r: r.source, is_fixed=True),
    _words("to", lambda r: r.target, is_fixed=True),
    _number("used", lambda r: r.used, _rate),
    _number("measured", lambda r: r.measured, _rate),
    _words("by", lambda r: r.measured_by),
    _number("round trip", lambda r: r.rtt_s, lambda s: f"{1e3 * s:.1f} ms"),
    _words("state", lambda r: r.state),
)
CLUSTER_COLUMNS: tuple[Column[ClusterRow], ...] = (
    _words("cluster", lambda r: r.name, is_fixed=True),
    _words("mark", lambda r: r.mark, is_fixed=True),
    _words("state", lambda r: r.state),
    _number("step", lambda r: r.step, _whole),
    _number("outer", lambda r: r.outer_step, _whole),
    _number("inner", lambda r: r.inner_steps, _whole),
    _number("weight", lambda r: r.weight, _percent),
    _number("sync", lambda r: r.sync_s, _seconds),
    _number("hidden", lambda r: r.hidden_share, _percent),
    _number("lag", lambda r: r.lag, _whole),
    _number("up", lambda r: r.up_bytes, format_bytes),
    _number("down", lambda r: r.down_bytes, format_bytes),
    _number("loss", lambda r: r.loss, "{:.4f}".format),
    _number("tokens/s", lambda r: r.tokens_per_second, format_count),
    _number("heard", lambda r: r.heard_s, format_duration),
    _words("launcher", lambda r: r.launcher),
    _words("note", lambda r: r.note),
)


def key_of(row: Row) -> tuple[Value, ...]:
    """Key by which a row is found again in the next snapshot."""
    match row:
        case RankRow():
            return row.cluster, row.rank
        case HostRow():
            return row.cluster, row.node
        case LinkRow():
            return row.cluster, row.source, row.target
        case ClusterRow():
            return (row.name,)


def hub_line(hub: HubRow) -> str:
    text = f"hub {hub.address}" if hub.address else "hub"
    if hub.round is not None:
        text += f": outer step {hub.round}"
    if hub.waits_for:
        text += f", waits for {', '.join(hub.waits_for)}"
    if hub.due_s is not None:
        text += f", at most {format_duration(hub.due_s)} more"
    return printable(f"{text}: {hub.error}" if hub.error else text, keep="")


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
    state = f"{run.state}: {run.phase}" if run.phase not in ("", run.state) else run.state
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
        more.append(f"restarts {run.restarts}, last: {run.last_restart}".removesuffix(", last: "))
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

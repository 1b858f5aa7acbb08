"""Runs as text: a table of all, one run in full, its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from isles.facts.console import Console
from isles.facts.units import format_bytes, format_count, format_duration
from isles.monitor.status import NodeReport, RunReport
from isles.run.bucket import RunStore
from isles.run.checkpoints import checkpoint_name, each_checkpoint
from isles.run.owner import shown_only
from isles.run.paths import RunDir
from isles.run.state import script_of

T = TypeVar("T")

_COLORS = {
    "queued": "cyan",
    "running": "green",
    "finished": "blue",
    "stopped": "yellow",
    "failed": "red",
    "killed": "red",
}


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """The console of this process; `width`: of the terminal that it draws on from afar."""
    if width is not None:
        return Console(stderr=stderr, width=width, force_terminal=True)
    made = Console(stderr=stderr)
    # A pipe has no width: nothing is cut there.
    return made if made.is_terminal else Console(stderr=stderr, width=240)


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def cell(value: T | None, form: Callable[[T], str]) -> str:
    """A value as text, or `-` if the value is unknown."""
    return "-" if value is None else form(value)


def runs_table(reports: Sequence[RunReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "state", "step", "loss", "tokens/s", "left", "saved", "started", "where"):
        table.add_column(column, no_wrap=True)
    for report in reports:
        table.add_row(
            _label(report),
            Text(report.state, style=_COLORS.get(report.state, "")),
            steps_text(report.step, report.total_steps),
            cell(report.loss, "{:.4f}".format),
            cell(report.tokens_per_second or None, format_count),
            cell(report.eta_s, format_duration),
            cell(report.checkpoint_step, "step {}".format),
            cell(report.begun_at, _moment),
            _short_place(report) + (f", of {report.owner}" if report.owner else ""),
        )
    return table


def report_lines(report: RunReport) -> list[str]:
    saved = cell(report.checkpoint_step, "step {}".format)
    rows = [
        ("state", _state_text(report)),
        ("step", steps_text(report.step, report.total_steps)),
        ("loss", cell(report.loss, "{:.4f}".format)),
        ("eval loss", cell(report.eval_loss, "{:.4f}".format)),
        ("speed", cell(report.tokens_per_second or None, lambda v: f"{format_count(v)} tokens/s")),
        ("left", cell(report.eta_s, format_duration)),
        ("saved", cell(report.checkpoint_at, lambda at: f"{saved}, {_moment(at)}")),
        ("started", cell(report.begun_at, _moment)),
        ("where", _where_text(report)),
        ("nodes", f"{report.num_nodes} of {report.max_nodes}" if report.max_nodes else "-"),
        *(("", _node_text(node)) for node in report.nodes),
        (
            "restarts",
            f"{report.restarts} (last: {report.last_restart})" if report.restarts else "-",
        ),
        *(("stuck", text) for text in report.hangs),
        *(("cluster", text) for text in _meeting_texts(report)),
        ("check", report.checked or "-"),
        ("directory", f"{report.on}:{report.path}" if report.on else report.path),
    ]
    lines = [_label(report), *(f"  {key:<10} {value}" for key, value in rows if value != "-")]
    lines += [f"  {shown_only(report.owner)}"] if report.owner else []
    return [*lines, f"  {report.hint}"] if report.hint else lines


MEETING_OLD_S = 15.0
"""A cluster that meets others in a bucket reads it about once a second."""


def _meeting_texts(report: RunReport) -> list[str]:
    # All clusters that meet in a bucket, as this one knows them by their heartbeats.
    meeting = (report.outer or {}).get("meeting") if report.state == "running" else None
    texts = []
    age_s = (meeting or {}).get("age_s") or 0.0
    if age_s > MEETING_OLD_S:
        texts.append(f"the bucket was last read {format_duration(age_s)} ago; since then unknown")
    for member in (meeting or {}).get("members") or []:
        text = f"{member['name']}  {member['state']} at step {member['step']}"
        if member["state"] in ("living", "dropped"):
            text += f", last heartbeat {format_duration(member['heard_s'])} ago"
        texts.append(f"{text}; {member['slow']}" if member["slow"] else text)
    return texts


def _node_text(node: NodeReport) -> str:
    place = f"{node.host} ({node.address})" if node.address not in ("", node.host) else node.host
    parts = [f"node {node.node}  {place}"]
    if node.ranks is not None:
        first, last = node.ranks
        parts.append(f"ranks {first}-{last}" if last > first else f"rank {first}")
    if node.pid is not None:
        parts.append(f"pid {node.pid}")
    if node.last_seen_s is not None and node.is_running:  # else the note says how it went
        parts.append(f"last seen {format_duration(node.last_seen_s)} ago")
    if node.note or not node.is_running:
        parts.append(node.note or "is not running")
    return "  ".join(parts)


def _label(report: RunReport) -> str:
    return f"{report.name}@{report.on.rpartition('@')[2]}" if report.on else report.name


def _short_place(report: RunReport) -> str:
    if report.state in ("unreachable", "unknown") and report.reason:
        return report.reason
    if report.job:
        place = f"{report.launcher} job {report.job}"
        return f"{place}: {report.queue}" if report.queue else place
    place = report.host or "-"
    if report.max_nodes and report.max_nodes > 1:
        place += f" and {report.max_nodes - 1} more"
    return f"{place} ({report.launcher})" if report.launcher != "local" else place


def steps_text(step: int | None, total: int | None) -> str:
    """`30/60`, `30` where the length is not known in steps, or `-`."""
    if step is None:
        return "-"
    return f"{step}/{total}" if total is not None else str(step)


def _state_text(report: RunReport) -> str:
    text: str = report.state
    if report.phase:
        text += f": {report.phase}" + (f", {report.detail}" if report.detail else "")
    if report.state == "killed":
        text += ": its processes are gone and have left no outcome"
    return f"{text}: {report.reason}" if report.reason not in ("", report.state) else text


def _where_text(report: RunReport) -> str:
    ranks = f"{report.world_size} x {report.device} on " if report.device else ""
    if report.job:
        queue = f": {report.queue}" if report.queue else ""
        return f"{ranks}{report.launcher} job {report.job} (attempt {report.attempt}){queue}"
    if report.host is None:
        return "-"
    by = f" by {report.launcher}" if report.launcher != "local" else ""
    return f"{ranks}{report.host}{by} (pid {report.pid}, attempt {report.attempt})"


def _moment(at: float) -> str:
    try:
        return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # no clock has shown that
        return "-"


def checkpoint_lines(run_dir: RunDir) -> list[str]:
    found = [
        (
            info.step,
            f"step {info.step:<8} {_moment(info.created_at)}  {format_bytes(info.size_bytes):>10}  "
            f"{info.path}",
        )
        for info in each_checkpoint(run_dir)
    ]
    if found:
        return [line for _, line in sorted(found)]
    script = script_of(run_dir)
    if script is None:
        return [f"{run_dir.name} has no checkpoint yet"]
    how = f"{script}, a script of your own, which keeps checkpoints by itself"
    return [f"{run_dir.name} runs {how}"]


def copy_lines(copy: RunStore) -> list[str]:
    """The whole checkpoints of a run at `checkpoint.remote`."""
    found = [(step, manifest) for step in copy.steps() if (manifest := copy.manifest(step))]
    return [
        f"step {step:<8} {_moment(manifest.created_at)}  "
        f"{format_bytes(manifest.size_bytes):>10}  "
        f"{copy.url}/checkpoints/{checkpoint_name(step)}"
        for step, manifest in found
    ] or [f"{copy.url} has no checkpoint yet"]

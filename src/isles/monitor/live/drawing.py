"""The screen of `isles top` as lines of text: the head, notes, and the tables that fit."""

from __future__ import annotations

import math
import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic

from rich.cells import cell_len
from rich.text import Text

from isles.facts.units import format_count, format_duration, printable
from isles.monitor.live.cells import (
    BAR,
    CLUSTER_COLUMNS,
    HOST_COLUMNS,
    LINK_COLUMNS,
    RANK_COLUMNS,
    Column,
    R,
    Row,
    Value,
    hub_line,
    key_of,
    parts_of,
    step_s,
)
from isles.monitor.live.model import LinkRow, Point, RankRow, Snapshot

NAMES = ("ranks", "hosts", "links", "clusters")
RANKS, CLUSTERS = 0, 3
SMALLEST = (60, 16)
"""Columns and lines below which nothing is drawn."""
LARGE = (150, 44)
"""Smallest screen that shows all four tables together (columns, lines)."""
OLD_S = 10.0

BAD, WORRY, GOOD, FAINT, HERE = "bold red", "bold magenta", "green", "dim", "reverse"
"""Terminal colors that are readable on black and on white, out of the sixteen that each terminal
defines. Color is never the only sign."""
_MARKS = {"dead": BAD, "silent": BAD, "straggler": WORRY, "throttled": WORRY}
_STATES = {"running": GOOD, "finished": GOOD, "failed": BAD, "killed": BAD, "unreachable": BAD}
_PARTS = (("░", "cyan"), ("█", "green"), ("▚", "blue"), ("·", "red"))
LEGENDS = (
    "░data █compute ▚communication ·waiting",
    "░data █compute ▚net ·wait",
    "░dat█cmp▚net·wait",
)
_WIDEST = 28
"""Largest width of a column of words. Longer words end in an ellipsis, numbers are never cut."""
_NOTE = 16
"""Smallest width of the last column. If the screen leaves less, the column is hidden."""


@dataclass(slots=True)
class TableView:
    """The user's choices for one table: order, columns, row."""

    sort: str = ""
    """Header of the column that sorts the table, or empty for the original order."""
    is_reversed: bool = False
    shift: int = 0
    """Columns that have been moved out to the left."""
    chosen: tuple[Value, ...] | None = None
    index: int = 0
    """Index of the chosen row among the filtered rows."""
    first: int = 0
    """Index of the first row on the screen."""
    widths: dict[str, int] = field(default_factory=dict)
    """Largest width so far of each column, so that a new value never moves other columns."""


@dataclass(slots=True)
class View:
    """The user's choices for the whole screen."""

    table: int = RANKS
    filter: str = ""
    tables: tuple[TableView, ...] = field(default_factory=lambda: tuple(TableView() for _ in NAMES))


@dataclass(slots=True)
class Drawn:
    """A screen, with the place of each header and row."""

    lines: list[Text] = field(default_factory=list)
    heads: list[tuple[int, int, int, int, str]] = field(default_factory=list)
    """Line, first cell, cell behind the last, table, header of the column."""
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By line: table, and index of the row."""
    chosen: Row | None = None
    """The chosen row of the table that has the keys."""
    heads_of_table: list[str] = field(default_factory=list)
    """Headers of the same table that can sort it."""
    count: int = 0
    page: int = 1
    has_more_columns: bool = False


def draw(
    snapshot: Snapshot, view: View, size: tuple[int, int], *, age_s: float, error: str
) -> Drawn:
    """Draw the screen without its last line, which shows the keys.

    Args:
        size: columns and lines of the terminal.
        age_s: age of the newest snapshot.
        error: why no newer snapshot comes, or empty.
    """
    width, height = size
    drawn = Drawn()
    drawn.lines += _head(snapshot, width, age_s, error)
    drawn.lines += note_lines(snapshot.notes, width, max(2, height // 8))
    tables = (
        _DrawnTable(0, RANK_COLUMNS, snapshot.ranks, view),
        _DrawnTable(1, HOST_COLUMNS, snapshot.hosts, view),
        _DrawnTable(2, LINK_COLUMNS, snapshot.links, view),
        _DrawnTable(
            3,
            CLUSTER_COLUMNS,
            snapshot.clusters,
            view,
            hub_line(snapshot.hub) if snapshot.hub else "",
        ),
    )
    left = height - 1 - len(drawn.lines)
    if width < LARGE[0] or height < LARGE[1]:
        tabs = Text(" ")
        for table in tables:
            tabs.append_text(table.title(is_short=width < 80 and table.index != view.table))
        tables[view.table].draw(drawn, tabs, width, left)
        return drawn
    shown = [table for table in tables if table.total or table.hub or table.index == view.table]
    for table, share in zip(shown, _shares([t.height for t in shown], left), strict=True):
        table.draw(drawn, Text(" ").append_text(table.title()), width, share)
    return drawn


def _shares(wanted: list[int], left: int) -> list[int]:
    # A few lines for each table; of the rest the first gets twice as many as any other.
    shares = [min(want, 4) for want in wanted]
    left -= sum(shares)
    while left > 0 and shares != wanted:
        for index in (0, *range(len(wanted))):
            if left > 0 and shares[index] < wanted[index]:
                shares[index] += 1
                left -= 1
    return shares


def _head(snapshot: Snapshot, width: int, age_s: float, error: str) -> list[Text]:
    run = snapshot.run
    title = Text.assemble(
        (f" {printable(run.name, keep='')} ", "bold"),
        (f" {run.state}", _STATES.get(run.state, "bold")),
        f": {printable(run.phase, keep='')}" if run.phase else "",
    )
    at = time.strftime("at %H:%M:%S ", time.localtime(snapshot.at))
    title.truncate(width - len(at), overflow="ellipsis", pad=True)
    lines = [title.append(at, FAINT)]
    if error or age_s > OLD_S:
        old = f"old data: nothing new for {format_duration(age_s)}" + (
            f": {error}" if error else ""
        )
        lines += [Text(f" {line}", f"{BAD} {HERE}") for line in _wrapped(old, width - 2, 3)]
    if run.reason not in ("", run.state, run.phase):
        lines += [Text(f" {line}") for line in _wrapped(run.reason, width - 2, 2)]
    line = Text(" ")
    for piece in _fields(snapshot, width):
        if line.cell_len > 1 and line.cell_len + piece.cell_len + 3 > width:
            lines.append(line)
            line = Text(" ")
        line.append("   " if line.cell_len > 1 else "").append_text(piece)
    lines.append(line)
    if run.restarts:
        why = f": {run.last_restart}" if run.last_restart else ""
        lines += [Text(f" {t}") for t in _wrapped(f"restarts {run.restarts}{why}", width - 2, 2)]
    return lines


def _fields(snapshot: Snapshot, width: int) -> list[Text]:
    run, found = snapshot.run, []
    room = 16 if width < 100 else 32
    if run.step is not None and run.total_steps:
        share = min(1.0, run.step / run.total_steps)
        full = int(share * room)
        step = Text.assemble("step ", (f"{run.step}/{run.total_steps}", "bold"), " ")
        step.append("█" * full, GOOD).append("░" * (room - full)).append(
            f" {math.floor(share * 100)}%"
        )
        found.append(step)
    elif run.step is not None:
        found.append(Text.assemble("step ", (str(run.step), "bold")))
    if run.left_s is not None:
        found.append(Text.assemble((format_duration(run.left_s), "bold"), " left"))
    if run.loss is not None:
        loss = Text.assemble("loss ", (f"{run.loss:.4f}", "bold"))
        found.append(loss.append(f" {curve(snapshot.curve, room + 4)}", "cyan"))
    for name, value, form in (
        ("tokens/s", run.tokens_per_second, format_count),
        ("MFU", run.mfu, "{:.1%}".format),
        ("goodput", run.goodput, "{:.1%}".format),
    ):
        if value is not None:
            found.append(Text.assemble(f"{name} ", (form(value), "bold")))
    if run.saved_step is not None:
        age = f", {format_duration(run.saved_age_s)} ago" if run.saved_age_s is not None else ""
        found.append(Text.assemble("saved ", (f"step {run.saved_step}{age}", "bold")))
    return found


def curve(points: Sequence[Point], width: int) -> str:
    """The loss as a line of blocks, from the first step to the newest. Empty without a loss."""
    losses = [p.loss for p in points if p.loss is not None and math.isfinite(p.loss)]
    if len(losses) < 2:
        return ""
    width = min(width, len(losses))
    edges = [round(i * len(losses) / width) for i in range(width + 1)]
    levels = [statistics.median(losses[a:b]) for a, b in pairwise(edges)]
    low, high = min(levels), max(levels)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((level - low) * scale)] for level in levels)


def note_lines(notes: Sequence[str], width: int, limit: int) -> list[Text]:
    """Notes, the worst first. The last line counts the notes that do not fit."""
    lines: list[Text] = []
    for index, note in enumerate(notes):
        own = _wrapped(note, width - 4, 99)
        room = limit - len(lines) - (1 if index < len(notes) - 1 else 0)
        if len(own) > room and lines:
            lines.append(Text(f"   and {len(notes) - index} more: n", WORRY))
            break
        for number, text in enumerate(own if len(own) <= room else _wrapped(note, width - 4, room)):
            lines.append(Text(f" {' ' if number else '!'} ", BAD).append(text, "bold"))
    return lines


def _wrapped(text: str, width: int, limit: int) -> list[str]:
    return textwrap.wrap(
        printable(" ".join(text.split())), width, max_lines=limit, placeholder=" …"
    )


class _DrawnTable(Generic[R]):
    """One table: its rows as cells, sorted, filtered, and drawn into the width that there is."""

    def __init__(
        self, index: int, columns: Sequence[Column[R]], rows: Sequence[R], view: View, hub: str = ""
    ) -> None:
        self.index, self.total, self.hub = index, len(rows), hub
        self._columns: Sequence[Column[R]] = columns
        self._rows: Sequence[R] = rows
        self._filter = view.filter
        self._has_keys = index == view.table
        self._view = view.tables[index]

    def title(self, *, is_short: bool = False) -> Text:
        name = f" {self.index + 1} {NAMES[self.index]} " + ("" if is_short else f"{self.total} ")
        return Text(name, HERE if self._has_keys else "")

    @property
    def height(self) -> int:
        """Number of lines of the whole table, with one empty line."""
        return 3 + bool(self.hub) + max(1, self.total)

    def draw(self, drawn: Drawn, title: Text, width: int, height: int) -> None:
        view, end = self._view, len(drawn.lines) + height
        cells = {id(row): [column.text(row) for column in self._columns] for row in self._rows}
        known = [
            index
            for index in range(len(self._columns))
            if any(own[index].strip("-/") for own in cells.values())
        ]
        words = self._filter.lower().split()
        rows = [
            row
            for row in self._rows
            if all(word in " ".join(cells[id(row)]).lower() for word in words)
        ]
        rows = self._sorted(rows)
        keys = [key_of(row) for row in rows]
        if view.chosen in keys:
            view.index = keys.index(view.chosen)
        view.index = max(0, min(view.index, len(rows) - 1))
        view.chosen = keys[view.index] if keys else view.chosen
        hub = _wrapped(self.hub, width - 2, 2) if self.hub else []
        page = max(1, height - 2 - len(hub))
        view.first = min(max(view.first, view.index - page + 1), view.index, len(rows) - page)
        view.first = max(0, view.first)
        chosen, gap = self._fit(known, list(cells.values()), width)
        shown: set[int] = {index for index, _ in chosen}
        out_right: list[int] = [i for i in known if i not in shown and i > max(shown, default=-1)]
        info = []
        if words:
            info.append(f"/{self._filter}: {len(rows)} of {self.total}")
        if view.sort and view.sort not in {self._columns[index].head for index in shown}:
            info.append(f"by {view.sort}")
        if len(rows) > page:
            info.append(f"{view.first + 1}-{view.first + page} of {len(rows)}")
        if view.shift or out_right:
            info += [f"← {view.shift}"] if view.shift else []
            info += [f"{len(out_right)} more →"] if out_right else []
        while info and title.cell_len + cell_len(" · ".join(info)) + 2 > width:
            info.pop()
        title.append(("  " + " · ".join(info)) if info else "", FAINT)
        drawn.lines.append(title)
        drawn.lines += [Text(f" {line}") for line in hub]
        if self._has_keys:
            drawn.chosen = rows[view.index] if rows else None
            drawn.heads_of_table = [self._columns[index].head for index in known]
            drawn.count, drawn.page, drawn.has_more_columns = len(rows), page, bool(out_right)
        if rows:
            drawn.lines.append(self._head(drawn, chosen, gap))
        else:
            drawn.lines.append(Text(f"   {self._nothing()}", FAINT))
        slowest = max((step_s(r) or 0.0 for r in self._rows if isinstance(r, RankRow)), default=0)
        for index in range(view.first, min(len(rows), view.first + page)):
            row, is_chosen = rows[index], self._has_keys and index == view.index
            drawn.rows[len(drawn.lines)] = (self.index, index)
            line = Text("▸" if is_chosen else " ", style=HERE if is_chosen else "")
            for number, (column, wide) in enumerate(chosen):
                line.append(" " * gap if number else "")
                line.append_text(self._cell(row, column, cells[id(row)][column], wide, slowest))
            drawn.lines.append(line)
        drawn.lines += [Text()] * (end - len(drawn.lines))

    def _sorted(self, rows: list[R]) -> list[R]:
        column = next((c for c in self._columns if c.head == self._view.sort), None)
        if column is None:
            return rows[::-1] if self._view.is_reversed else rows
        # The largest figure first, names by the alphabet; what is not known stays last.
        known = [(value, row) for row in rows if (value := column.get(row)) not in (None, "")]
        falls = (column.is_words or column.is_fixed) == self._view.is_reversed
        known.sort(key=lambda entry: entry[0], reverse=falls)
        return [row for _, row in known] + [row for row in rows if column.get(row) in (None, "")]

    def _fit(
        self, known: list[int], cells: list[list[str]], width: int
    ) -> tuple[list[tuple[int, int]], int]:
        # Columns with their widths: those that stay, then from the first that is not moved out as
        # many as fit whole; and the gap between them.
        widths = self._view.widths
        for index in known:
            head = self._columns[index].head
            wide = max(cell_len(own[index]) for own in cells)
            if self._columns[index].is_words:
                wide = min(wide, _WIDEST)
            wide = max(wide, cell_len(head) + (head == self._view.sort), widths.get(head, 0))
            widths[head] = wide
        fixed: list[int] = [index for index in known if self._columns[index].is_fixed]
        others: list[int] = [index for index in known if not self._columns[index].is_fixed]
        self._view.shift = max(0, min(self._view.shift, len(others) - 1))
        found: list[tuple[int, int]] = []
        for gap in (2, 1):
            found, left = [], width - 1
            for index in fixed + others[self._view.shift :]:
                head = self._columns[index].head
                least = {BAR: len(LEGENDS[-1]), "note": _NOTE}.get(head, widths[head])
                if least + gap * bool(found) > left:
                    break
                left -= least + gap * bool(found)
                found.append((index, least))
            else:
                break
        for head, most in ((BAR, len(LEGENDS[0])), ("note", width)):
            for number, (index, wide) in enumerate(found):
                if self._columns[index].head == head:
                    more = min(left, most - wide)
                    found[number], left = (index, wide + more), left - more
        return found, gap

    def _head(self, drawn: Drawn, chosen: list[tuple[int, int]], gap: int) -> Text:
        line = Text(" ", style="bold")
        for number, (index, wide) in enumerate(chosen):
            column, start = self._columns[index], line.cell_len + (gap if number else 0)
            line.append(" " * (gap if number else 0))
            name = column.head
            if name == BAR:
                name = next(legend for legend in LEGENDS if len(legend) <= wide)
            if column.head == self._view.sort:
                name = (name + ("▴" if self._view.is_reversed else "▾"))[-wide:]
            line.append(
                name.ljust(wide) if column.is_words or name in LEGENDS else name.rjust(wide)
            )
            drawn.heads.append((len(drawn.lines), start, start + wide, self.index, column.head))
        return line

    def _cell(self, row: R, index: int, text: str, wide: int, slowest_s: float) -> Text:
        column = self._columns[index]
        if isinstance(row, RankRow) and column.head == BAR:
            return _bar(row, wide, slowest_s)
        style = "" if isinstance(row, LinkRow) else _MARKS.get(row.mark, "")
        if column.head == "state":
            style = _STATES.get(text, style)
        if not (column.is_fixed or column.head in ("state", "note", "heard")):
            style = ""
        if cell_len(text) > wide and column.head != "note":
            text = f"{text[: wide // 2]}…{text[len(text) - (wide - wide // 2 - 1) :]}"
        cell = Text(text if column.is_words else text.rjust(wide), style)
        cell.truncate(wide, overflow="ellipsis", pad=True)
        return cell

    def _nothing(self) -> str:
        if self.total:
            return f"none has {self._filter!r} in it; / and Escape show all again"
        one_cluster = "this run is one cluster"
        return (
            one_cluster if self.index == CLUSTERS else f"no {NAMES[self.index][:-1]} is known yet"
        )


def _bar(row: RankRow, wide: int, slowest_s: float) -> Text:
    # All bars have one scale; each part ends where the sum so far is rounded to.
    bar, edge, total = Text(), 0, 0.0
    if (parts := parts_of(row)) and slowest_s > 0:
        for seconds, (block, color) in zip(parts, _PARTS, strict=True):
            total += seconds
            end = min(wide, round(wide * total / slowest_s))
            bar.append(block * (end - edge), color)
            edge = end
    bar.truncate(wide, pad=True)
    return bar

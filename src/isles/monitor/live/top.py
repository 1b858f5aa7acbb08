"""`isles top`: a run, live, in the terminal. It only reads, except that `x` stops the run where
that is confirmed."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.color import Color
from textual.containers import VerticalScroll
from textual.filter import LineFilter
from textual.geometry import Region
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from isles.errors import ExitCode, UserError
from isles.facts.units import printable
from isles.monitor.live.drawing import (
    BAD,
    LEGENDS,
    NAMES,
    OLD_S,
    SMALLEST,
    Drawn,
    TableView,
    View,
    draw,
)
from isles.monitor.live.model import RankRow, Snapshot
from isles.run.env import forget_window_size

if TYPE_CHECKING:
    from isles.monitor.live.source import Watch

LOG_LINES = 500
_LOOK_S = 0.5
_ASKED_S = 5.0
"""Seconds that `top` waits at its end, so that a confirmed stop reaches the run."""
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")
KEYS = (
    " 1-4 table  ←→ columns  s sort  / filter  t stack  l log  x stop  ? help  q quit",
    " s sort  / filter  t stack  l log  x stop  ? help  q quit",
)
HELP = f"""\
1 2 3 4      ranks, hosts, links, clusters. A screen of 150 x 44 shows all
Tab          the next table
up, down     another row, as PgUp, PgDn, Home and End
left, right  other columns. The line above a table counts hidden columns
s            sort by the next column, as a click on its header
r            reverse the order
/            show only rows with these words. Escape shows all rows
t, Enter     the stacks of all threads of this rank
l            the last lines of this rank's log
n            all notes
x            stop the run, after a confirmation
q, Ctrl+C    leave. The run continues: only a confirmed x changes it

mark         straggler: the other ranks wait for this rank
             throttled: the GPU runs below its normal clock
             silent: the rank sends no heartbeat. dead: its process has ended
use          utilization of the GPU. Without a GPU, 100% is one CPU core
now/peak/of  memory in use, largest use so far, capacity
parts        {LEGENDS[0]},
             in its last timed step. The bars of all ranks have one scale
took         seconds of that step
heard        age of the last heartbeat
rows         sequences per step × micro-batch
does, for    current stage, and its age
clock        difference to the clock of the first host
outer, inner the outer step, and the inner steps of this round
hidden       share of the exchange that overlaps with training
lag          outer steps behind the hub

- means unknown. Columns without any value are hidden.
"""


def run_top(watch: Watch) -> int:
    """Show a run until the user leaves. Returns the exit code.

    The output must be a terminal. `top` restores its state. The run continues.
    """
    # A closed terminal ends this process at once: nothing has to be saved, and there is nothing to
    # draw on. It may have been started with this signal ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    forget_window_size()
    top = Top(watch)
    asyncio.run(top.run_async())
    if top.stopping is not None:
        top.stopping.join(_ASKED_S)
    return top.return_code or ExitCode.OK


class Lines(Widget):
    """Lines of text; a change draws only the lines that are not as they were."""

    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Text] = []

    def show(self, lines: list[Text]) -> None:
        old, self._lines = self._lines, lines
        if len(old) != len(lines):
            self.refresh()
            return
        changed = [
            y for y, line in enumerate(lines) if line != old[y] or line.style != old[y].style
        ]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        if y >= len(self._lines):
            return Strip.blank(self.size.width)
        line = self._lines[y].copy()
        line.stylize_before(line.style)  # rich forgets it where nothing in the line has a style
        line.truncate(self.size.width, pad=True)
        return Strip(line.render(self.app.console))


class _Shown(LineFilter):
    """Shows control characters from any source as text, just before the screen.

    Texts that are cut to a width were cleaned before.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            each if each.control else Segment(printable(each.text), each.style) for each in segments
        ]


class Top(App[None]):
    """The screen and its keys."""

    CSS = "Lines { width: 1fr; height: 1fr; }"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    BINDINGS: ClassVar = [
        *(Binding(str(n + 1), f"table({n})") for n in range(4)),
        Binding("tab", "table(-1)", priority=True),
        *(Binding(key, f"move('{key}')") for key in ("up", "down", "pageup", "pagedown")),
        *(Binding(key, f"move('{key}')") for key in ("home", "end")),
        Binding("left", "shift(-1)"),
        Binding("right", "shift(1)"),
        Binding("s", "sort"),
        Binding("r", "reverse"),
        Binding("slash", "filter"),
        Binding("escape", "all_rows"),
        Binding("t,enter", "stack"),
        Binding("l", "log"),
        Binding("n", "notes"),
        Binding("x", "stop"),
        Binding("question_mark", "help"),
        Binding("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
    ]

    def __init__(self, watch: Watch) -> None:
        # The terminal's own colors, on its own ground, light or dark.
        super().__init__(ansi_color=True)
        self._watch = watch
        self._view, self._drawn, self._is_typing = View(), Drawn(), False
        self._snapshot: Snapshot | None = None
        self._come_at = time.monotonic()
        self._drawn_at = 0.0
        self._shown = _Shown()
        self.stopping: threading.Thread | None = None

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._shown]

    def compose(self) -> ComposeResult:
        yield Lines()

    def on_mount(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(number, self.exit, None, 128 + number)
        self.set_interval(_LOOK_S, self._look)
        self._look()

    def _look(self) -> None:
        # Draw what is new; where nothing is new for long, how long that is.
        now, newest = time.monotonic(), self._watch.latest
        is_new, is_old = newest is not self._snapshot, now - self._come_at > OLD_S
        if is_new:
            self._snapshot, self._come_at = newest, now
        if is_new or ((is_old or self._watch.error) and now - self._drawn_at > 4 * _LOOK_S):
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        width, height = self.size
        error = printable(self._watch.error)
        if width < SMALLEST[0] or height < SMALLEST[1]:
            needs = "{} x {}".format(*SMALLEST)
            text = f"This window is too small: {width} x {height}\nisles top needs {needs}\nq quits"
            self._drawn = Drawn([Text(line) for line in text.splitlines()])
        elif self._snapshot is None:
            waiting = Text(f" {self._watch.typed}: waiting for its first data")
            self._drawn = Drawn([waiting, Text(f" {error}", BAD)])
        else:
            age_s = self._drawn_at - self._come_at
            self._drawn = draw(
                self._snapshot, self._view, (width, height), age_s=age_s, error=error
            )
        keys = next((text for text in KEYS if len(text) <= width), "")
        if self._is_typing:
            keys = f" only rows with: {self._view.filter}█   Enter keeps, Escape clears"
        self._drawn.lines += [Text()] * (height - 1 - len(self._drawn.lines))
        self.query_one(Lines).show([*self._drawn.lines, Text(keys, "dim")])

    def on_resize(self) -> None:
        for table in self._view.tables:
            table.widths.clear()
        self._draw()

    @property
    def _table(self) -> TableView:
        return self._view.tables[self._view.table]

    def action_table(self, number: int) -> None:
        self._view.table = number if number >= 0 else (self._view.table + 1) % len(NAMES)
        self._draw()

    def action_move(self, key: str) -> None:
        page, last = self._drawn.page, max(0, self._drawn.count - 1)
        moves = {"up": -1, "down": 1, "pageup": -page, "pagedown": page, "home": -last, "end": last}
        self._choose(self._view.table, max(0, min(last, self._table.index + moves[key])))

    def _choose(self, table: int, index: int) -> None:
        self._view.table = table
        self._table.index, self._table.chosen = index, None
        self._draw()

    def action_shift(self, by: int) -> None:
        if by < 0 or self._drawn.has_more_columns:
            self._table.shift = max(0, self._table.shift + by)
            self._draw()

    def action_sort(self) -> None:
        heads = ["", *self._drawn.heads_of_table]
        at = heads.index(self._table.sort) if self._table.sort in heads else 0
        self._sort(self._view.table, heads[(at + 1) % len(heads)])

    def action_reverse(self) -> None:
        self._table.is_reversed = not self._table.is_reversed
        self._draw()

    def _sort(self, table: int, head: str) -> None:
        self._view.table = table
        is_same = bool(head) and head == self._table.sort
        self._table.is_reversed = is_same and not self._table.is_reversed
        self._table.sort = head
        self._draw()

    def action_filter(self) -> None:
        self._is_typing = True
        self._draw()

    def action_all_rows(self) -> None:
        self._is_typing, self._view.filter = False, ""
        self._draw()

    def on_key(self, event: events.Key) -> None:
        # No widget for a line of text: a key that comes while one takes the focus would be lost.
        if not self._is_typing or event.key == "escape":
            return
        event.prevent_default()
        if event.key == "enter":
            self._is_typing = False
        elif event.key == "backspace":
            self._view.filter = self._view.filter[:-1]
        elif event.is_printable:
            self._view.filter += event.character or ""
        self._draw()

    def on_click(self, event: events.Click) -> None:
        x, y = event.screen_x, event.screen_y
        for line, start, end, table, head in self._drawn.heads:
            if y == line and start <= x < end:
                self._sort(table, head)
                return
        if y in self._drawn.rows:
            self._choose(*self._drawn.rows[y])

    def on_mouse_scroll_down(self) -> None:
        self.action_move("down")

    def on_mouse_scroll_up(self) -> None:
        self.action_move("up")

    def action_stack(self) -> None:
        if (row := self._rank()) is not None:
            title = f"what {_name(row)} does now"
            self.push_screen(TextScreen(title, lambda: self._watch.stack(row), again=True))

    def action_log(self) -> None:
        if (row := self._rank()) is not None:
            title = f"the last {LOG_LINES} lines of {_name(row)}"
            work = self._watch.log_lines
            self.push_screen(
                TextScreen(title, lambda: "\n".join(work(row, LOG_LINES)), again=True, at_end=True)
            )

    def _rank(self) -> RankRow | None:
        chosen = self._drawn.chosen
        if not isinstance(chosen, RankRow):
            self.notify("choose a rank first: 1", timeout=3)
            return None
        return chosen

    def action_notes(self) -> None:
        notes = self._snapshot.notes if self._snapshot else ()
        self.push_screen(TextScreen("notes", lambda: "\n\n".join(notes) or "nothing is wrong"))

    def action_help(self) -> None:
        self.push_screen(TextScreen("keys and words of isles top", lambda: HELP))

    def action_stop(self) -> None:
        name = self._watch.typed

        def stop(is_sure: bool | None) -> None:
            if is_sure:
                reader = TextScreen(
                    f"stopping {name}", work, "It is asked, and waited for; q goes back."
                )
                self.push_screen(reader)
                self.stopping = reader.thread

        def work() -> str:
            code = self._watch.stop(False)
            end = f"{name} has stopped" if code == ExitCode.OK else f"not stopped: exit code {code}"
            return "\n".join([*self._watch.said, "", end])

        self.push_screen(Question(name, self._watch.stop_means), stop)


class TextScreen(ModalScreen[None]):
    """A text that takes a while to come, to scroll in."""

    CSS = """
    TextScreen { background: ansi_default; }
    .title { text-style: bold; height: 1; }
    .help { text-style: dim; height: 1; }
    VerticalScroll { height: 1fr; }
    """
    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar = [
        Binding("escape,q,enter", "dismiss"),
        Binding("r", "read"),
        Binding("ctrl+c", "app.quit", priority=True),
    ]

    def __init__(
        self,
        title: str,
        work: Callable[[], str],
        waiting: str = "…",
        *,
        again: bool = False,
        at_end: bool = False,
    ) -> None:
        super().__init__()
        self._title, self._work, self._again, self._at_end = title, work, again, at_end
        self._waiting = waiting
        # A thread of its own, which keeps nobody from leaving.
        self.thread = threading.Thread(target=self._read, daemon=True)

    def compose(self) -> ComposeResult:
        yield Static(Text(f" {self._title}"), classes="title")
        with VerticalScroll():
            yield Static(Text(self._waiting), classes="text")
        again = "  r again" if self._again else ""
        yield Static(f" ↑↓ PgUp PgDn scroll{again}  Esc q back", classes="help", markup=False)

    def on_mount(self) -> None:
        self.thread.start()

    def action_read(self) -> None:
        if self._again and not self.thread.is_alive():
            self.thread = threading.Thread(target=self._read, daemon=True)
            self.thread.start()

    def _read(self) -> None:
        try:
            text = self._work()
        except UserError as error:
            text = str(error)
        # The person may have left in the meantime.
        with suppress(RuntimeError):
            self.app.call_from_thread(self._show, text)

    def _show(self, text: str) -> None:
        if self.is_attached:
            lines = _ESCAPES.sub("", text).expandtabs().splitlines()
            self.query_one(".text", Static).update(Text("\n".join(map(printable, lines))))
            if self._at_end:
                self.query_one(VerticalScroll).scroll_end(animate=False)


class Question(ModalScreen[bool]):
    """Question before the run is stopped. Only `y` means yes."""

    CSS = """
    Question { align: center middle; }
    .question { width: 56; height: auto; border: heavy red; padding: 1 2; }
    .question { background: ansi_default; }
    """
    BINDINGS: ClassVar = [
        Binding("y", "dismiss(True)"),
        Binding("n,escape,q", "dismiss(False)"),
        Binding("ctrl+c", "app.quit", priority=True),
    ]

    def __init__(self, name: str, means: str) -> None:
        super().__init__()
        self._name, self._means = name, means

    def compose(self) -> ComposeResult:
        text = Text.assemble(
            (f"Stop {self._name}?", "bold"),
            f"\n\n{self._means}\n\n",
            ("y", "bold"),
            " stop it     ",
            ("n", "bold"),
            " let it continue",
        )
        yield Static(text, classes="question")


def _name(row: RankRow) -> str:
    cluster = f" of {row.cluster}" if row.cluster else ""
    return f"rank {row.rank}{cluster} on {row.host}"

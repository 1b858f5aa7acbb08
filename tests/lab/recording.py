"""The recording of README.md: three hosts over ssh, one of them loses its network and comes back.

    python -m tests.lab.recording            run it on hosts of the lab (root, minutes), and draw it
    python -m tests.lab.recording --draw     draw the lines of the last recording again

Each command is typed on a host of the lab, and every line is one that it printed. Lines that
repeat are dropped, and waits are shortened to what a reader needs.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import textwrap
import threading
from html import escape
from pathlib import Path

from isles.run.paths import RunDir
from tests.deadline import until
from tests.documents import ROOT
from tests.lab.home import assert_nothing_left, begin, end, until_step, write_run
from tests.lab.hosts import Lab, hosts

LINES = Path(__file__).with_suffix(".json")
DRAWN = ROOT / "docs" / "pictures" / "recording.svg"
COLUMNS, ROW, TOP, WIDTH = 98, 20, 52, 860
LOOP_S, LONGEST_S, TYPING_S, LINE_S = 30.0, 1.6, 1.0, 0.25
STEP = re.compile(r"step \d+/")

Line = tuple[str, str]
"""`$` a typed command, `#` a remark, `>` a line that was printed; and its text."""


class Typed:
    """A command on a host, whose lines are kept as they come."""

    def __init__(self, lab: Lab, *words: str) -> None:
        self.text = f"isles {' '.join(words)}"
        self.lines: list[str] = []
        self._process = begin(lab, *words)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.decode().rstrip())

    def end(self) -> None:
        """Wait until it has ended."""
        self._reader.join()
        end(self._process)

    def shown(self, most_steps: int, first: int = 0) -> list[Line]:
        """Its lines from one on, with few of the lines of steps."""
        found: list[Line] = []
        steps = 0
        for line in self.lines[first:]:
            steps += bool(STEP.match(line))
            if line and not (STEP.match(line) and steps > most_steps):
                found.append((">", line))
        return found


def record() -> list[Line]:
    """Make the run; the lines of its commands."""
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder), 3) as lab:
        write_run(
            lab,
            "home",
            nodes="2:3",
            training={"max_steps": 600, "logging_steps": 20, "learning_rate": 0.003},
            checkpoint={"every_steps": 20, "every_minutes": None, "keep": 2},
        )
        run_dir = RunDir(lab.shared / "runs" / "home-1")
        first = run_dir.attempt(1)
        train = Typed(lab, "train", "home.yaml")
        until_step(first, 61)
        found: list[Line] = [("$", train.text), *train.shown(3)]
        num = len(train.lines)
        found.append(("#", "the network cable of a3 is pulled"))
        lab.link("a3", "cut")
        until_step(first, 101, restart=1)
        found += train.shown(2, num)
        lab.link("a3", "restore")
        found.append(("#", "a3 is back: stop, and start with all three again"))
        stop = Typed(lab, "stop", "home")
        stop.end()
        train.end()
        found += [("$", stop.text), *stop.shown(0)[-1:]]
        again = Typed(lab, "train", "home.yaml")
        second = run_dir.attempt(2)
        until(lambda: any(map(STEP.match, again.lines)), "a step after the resume")
        until_step(second, 1)
        found += [("$", again.text), *again.shown(3)]
        Typed(lab, "stop", "home").end()
        again.end()
        assert_nothing_left(lab)
    typed = [line for line in found if line[0] != ">"]
    return [line for i, line in enumerate(found) if line in typed or line not in found[:i]]


def times(lines: list[Line]) -> list[float]:
    """When each line is shown, in seconds; the whole takes LOOP_S with a rest at its end."""
    costs = {"$": TYPING_S + LINE_S, "#": LONGEST_S, ">": LINE_S}
    found, now = [], 0.5
    for kind, text in lines:
        now += LONGEST_S if STEP.match(text) else costs[kind]
        found.append(now)
    scale = min(1.0, (LOOP_S - 5) / now)
    return [time * scale for time in found]


def svg(lines: list[Line]) -> str:
    """The lines as a terminal, each shown at its time; all of them where nothing may move."""
    rows, rules = [], []
    num_rows = 0
    for index, ((kind, text), time) in enumerate(zip(lines, times(lines), strict=True)):
        at = 100 * time / LOOP_S
        rules.append(
            f"@keyframes l{index} {{0%, {at:.2f}% {{opacity: 0}} "
            f"{at + 0.01:.2f}%, 98% {{opacity: 1}} 100% {{opacity: 0}}}} "
            f".l{index} {{animation: l{index} {LOOP_S:.0f}s infinite}}"
        )
        prompt = {"$": "$ ", "#": "# ", ">": ""}[kind]
        fill = {"$": "#ffffff", "#": "#f6c177", ">": "#b9c4d0"}[kind]
        for row in textwrap.wrap(prompt + text, COLUMNS, subsequent_indent="    "):
            rows.append(
                f'<text class="l{index}" x="20" y="{TOP + ROW * num_rows}" fill="{fill}" '
                f'xml:space="preserve">{escape(row)}</text>'
            )
            num_rows += 1
    height = TOP + ROW * num_rows + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
            '     font-family="ui-monospace, monospace" font-size="13">',
            "<title>Three hosts train; one is cut off; the run continues and resumes</title>",
            "<style>",
            "@media (prefers-reduced-motion: no-preference) {",
            *rules,
            "}",
            "</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#1b2330"/>',
            '<g><circle cx="22" cy="18" r="5" fill="#e06c75"/>'
            '<circle cx="40" cy="18" r="5" fill="#e5c07b"/>'
            '<circle cx="58" cy="18" r="5" fill="#98c379"/></g>',
            *rows,
            "</svg>\n",
        ]
    )


def main(words: list[str]) -> int:
    """Record and draw, or draw only."""
    if words != ["--draw"]:
        LINES.write_text(json.dumps(record(), indent=0, ensure_ascii=False) + "\n")
    lines = [(kind, text) for kind, text in json.loads(LINES.read_text())]
    DRAWN.write_text(svg(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`isles top` in a real terminal: what it draws, its keys, and how it leaves."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from shlex import quote

import pytest

from tests.deadline import DEADLINE_S, until
from tests.terminal import Terminal

pytestmark = pytest.mark.lab  # it needs tmux

TABLES = ("1 ranks 6", "2 hosts 2", "3 links 2", "4 clusters 2")


def top(folder: Path, *, size: tuple[int, int] = (80, 24), **env: str) -> Terminal:
    """It shows a run that is made up and moves."""
    program = (sys.executable, "-m", "tests.made_watch", folder)
    return Terminal(*program, size=size, cwd=Path(__file__).parents[2], env=env)


def step_of(screen: str) -> int:
    found = re.findall(r"step (\d+)/", screen)
    return int(found[0]) if found else 0


def test_it_moves_and_fits_every_window(tmp_path: Path) -> None:
    with top(tmp_path, COLUMNS="80", LINES="24") as terminal:  # as some shells export them
        screen = terminal.until("/4000 ", "wide-3  running: training", "q quit")
        began = step_of(screen)
        figures = r"left\n loss 2\.\d{4} █.* tokens/s 1\d\d\.\dk .* MFU 4\d\.\d% .* goodput 97\.1%"
        assert re.search(figures, screen)
        assert "saved step 1200" in screen and "restarts 1: oslo-01 was lost" in screen
        notes = [line for line in screen.splitlines() if line.startswith(" !")]
        assert "rank 2 on oslo-01: it was killed by SIGKILL" in notes[0]
        rows = [line for line in screen.splitlines() if "/79.6" in line]
        assert [row.split()[1] for row in rows] == list("012012")
        for row, mark in ((2, "dead"), (3, "straggler"), (4, "throttled"), (5, "silent")):
            assert mark in rows[row]
        bars = [re.findall("[░█▚·]+", row)[0] for row in rows]
        assert bars[3].count("█") > bars[0].count("█") and "·" in bars[0] and "·" not in bars[3]
        terminal.until_it(lambda text: step_of(text) > began)
        terminal.after("4", "waits for lyon", "hidden", "50%")

        terminal.resize(200, 60)
        wide = terminal.until(*TABLES, "hub hub.example.org", "H100 80GB")
        assert wide.count("/79.6") == 6
        terminal.resize(50, 24)
        terminal.until("too small: 50 x 24")
        terminal.resize(60, 16)
        terminal.until("step 1", "q quit", gone="too small")
        terminal.resize(110, 30)
        terminal.until(*TABLES, gone="hub hub.example.org:7777\n")
        assert re.search(r"\x1b\[[0-9;]*3[1-6]", terminal.screen(styles=True)), "colored"
    with top(tmp_path, NO_COLOR="1") as terminal:
        terminal.until("straggler", "dead")
        plain = terminal.screen(styles=True)
        assert not re.search(r"\x1b\[([0-9]+;)*[34][0-8](;|m)", plain), "no color"
        assert "\x1b[7m" in plain, "the chosen row is reversed"


def test_keys_read_and_only_a_yes_stops(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    with top(tmp_path) as terminal:
        terminal.until("▸oslo", "q quit")
        terminal.after("Right Right Right", "← 3", gone="/79.6")
        terminal.after("Left Left Left", "/79.6", gone="← ")
        terminal.after("s s s", "mark▾")
        first = terminal.until_it(lambda screen: re.search(r"mark▾.*\n.oslo +2 dead", screen))
        assert re.search("▸oslo +0 ", first), "the chosen row stays the chosen one"
        terminal.after("/", "only rows with:")
        terminal.after("q s x", "/qsx: 0 of 6", "none has 'qsx' in it")
        terminal.after("Escape", TABLES[0], "/79.6", gone="qsx")
        terminal.after("/ s t r a g Enter", "/strag: 1 of 6", "▸lyon", "0 straggler", "q quit")
        where = "what rank 0 of lyon on lyon-01 does now"
        terminal.after("t", where, "line 20, in train", gone="line 60")
        terminal.after("End", "line 60, in train")
        terminal.after("q", "/strag", gone="in train")
        terminal.after("Escape", "2 dead", gone="/strag")
        terminal.after("Home Enter", "rank 2 has not said within 20 s", "fix: it is frozen")
        terminal.after("Escape", "q quit")
        for key, text in (
            ("l", "INFO rank=2 line=499"),
            ("?", "The run continues: only a confirmed x changes it"),
            ("n", "rank 1 on lyon-01: its GPU is throttled by heat"),
        ):
            terminal.after(key, text, gone="line=300")
            terminal.after("q", "q quit")
        terminal.after("2 t", "choose a rank first")

        for no in ("n", "Escape", "q"):
            terminal.after("x", "Stop made-1?", "All its ranks save a checkpoint")
            terminal.after(f"Enter Space s Up {no}", "q quit", gone="Stop made-1?")
        assert not stopped.exists()
        terminal.after("x", "Stop made-1?")
        terminal.after("y", "waiting: saves a checkpoint", "made-1 has stopped")
        assert stopped.read_text() == "now=False"


def test_a_click_sorts_and_old_data_is_said_to_be_old(tmp_path: Path) -> None:
    with top(tmp_path) as terminal:
        lines = terminal.until("▸oslo", "q quit").splitlines()
        y = next(number for number, line in enumerate(lines) if "now/peak/of" in line)
        x = lines[y].index("°C") + 1
        for event in ("M", "m", "M", "m"):
            terminal.type("Escape", f"[<0;{x};{y + 1}{event}")
        (tmp_path / "error").write_text("a1 cannot be asked: Connection refused")
        old = terminal.until("old data: nothing new for", "a1 cannot be asked: Connection refused")
        assert "°C▴" in old or "°C▾" in old
        terminal.until_it(lambda text: re.search(r"nothing new for (1\d|[4-9])s", text))
        (tmp_path / "error").unlink()
        terminal.until("wide-3  running", gone="old data")


def test_it_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """By q, by Ctrl+C, by a signal; and a window that is closed ends it."""
    flags = ("alternate_on", "cursor_flag", "mouse_any_flag", "bracketed_paste_flag")
    start = f"{quote(sys.executable)} -m tests.made_watch {tmp_path}"
    shell = ("env", "PS1=$ ", "bash", "--norc", "--noprofile")
    with Terminal(*shell, cwd=Path(__file__).parents[2]) as terminal:
        terminal.until("$")
        terminal.type(f"echo before; stty -g > {tmp_path}/first", "Enter")
        before = [terminal.value(flag) for flag in flags]
        for number, (leave, code) in enumerate((("q", 0), ("C-c", 0), ("TERM", 143), ("INT", 130))):
            compare = f"stty -g | cmp - {tmp_path}/first"
            terminal.type(f"{start}; echo left-{number} $?; {compare}", "Enter")
            terminal.until("q quit")
            assert terminal.value("alternate_on") == "1"
            if code:
                child = until(terminal.process.children)[0]
                child.send_signal(signal.Signals[f"SIG{leave}"])
            else:
                terminal.type(leave)
            screen = terminal.until("before", f"left-{number} {code}", gone="q quit")
            assert "differ" not in screen and "Traceback" not in screen
            assert [terminal.value(flag) for flag in flags] == before
        terminal.type(start, "Enter")
        terminal.until("q quit")
        child = terminal.process.children()[0]
        terminal.close()
        child.wait(DEADLINE_S)

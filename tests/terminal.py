"""A real terminal for a program that draws on it: tmux, with a server of its own."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.deadline import DEADLINE_S, run_program, until


class Terminal:
    """A program in a terminal of a size, from its start to the end of the `with` block."""

    def __init__(
        self,
        *words: str | Path,
        size: tuple[int, int] = (80, 24),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tmux-")
        command = "exec " + shlex.join(map(str, words))
        width, height = map(str, size)
        options = ("-f", os.devnull, "new-session", "-d", "-x", width, "-y", height)
        # tmux gives its panes the environment of its server, which this call starts.
        env = {**os.environ, "LC_ALL": "C.UTF-8", "COLORTERM": "", **(env or {})}
        done = run_program([*self._tmux, *options, command], cwd, env)
        assert done.returncode == 0, done.stderr
        self.server = psutil.Process(int(self.value("pid")))
        self.process = psutil.Process(int(self.value("pane_pid")))

    @property
    def _tmux(self) -> list[str]:
        return ["tmux", "-S", f"{self._folder.name}/socket", "-u"]

    def _ask(self, *words: str) -> str:
        done = run_program([*self._tmux, *words])
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def value(self, name: str) -> str:
        """What tmux knows of it, such as `cursor_flag`."""
        return self._ask("display-message", "-p", f"#{{{name}}}").strip()

    def screen(self, *, styles: bool = False) -> str:
        """What stands on it, without the blanks at the ends of lines; with styles as escapes."""
        return self._ask("capture-pane", "-p", *(["-e"] if styles else []))

    def type(self, *keys: str) -> None:
        """Press keys, by their tmux names."""
        self._ask("send-keys", *keys)

    def after(self, keys: str, *texts: str, gone: str = "\0") -> str:
        """Press keys, with blanks between; see `until`."""
        self.type(*keys.split())
        return self.until(*texts, gone=gone)

    def resize(self, width: int, height: int) -> None:
        self._ask("resize-window", "-x", str(width), "-y", str(height))

    def until(self, *texts: str, gone: str = "\0") -> str:
        """Wait until all texts stand on it, and `gone` does not; the screen."""

        def shows(screen: str) -> bool:
            return all(text in screen for text in texts) and gone not in screen

        return self.until_it(shows, f"{texts} without {gone!r}")

    def until_it(self, condition: Callable[[str], object], what: str = "") -> str:
        """Wait until a condition holds of the screen; the screen."""
        last = ""

        def look() -> bool:
            nonlocal last
            last = self.screen()
            return bool(condition(last))

        try:
            until(look, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{last}") from None
        return last

    def close(self) -> None:
        """Close the window, as a person does; the program gets SIGHUP."""
        run_program([*self._tmux, "kill-server"])
        self.server.wait(DEADLINE_S)
        self._folder.cleanup()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

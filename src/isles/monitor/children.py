"""Commands that run at the same time, one for each cluster or host; their lines in one queue."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Literal

from isles.launch.remote.login import STARTED
from isles.run.env import inherited

_PATIENCE_S = 30.0
"""Interval of the lines that say for whom a command waits."""

_SHOWN_CHARS = 100
_END_S = 30.0
"""How long a command may take to end once it was interrupted."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that a child has printed; or, of kind end, that it has ended."""

    child: str
    kind: Literal["out", "err", "end"]
    text: str = ""
    code: int = 0
    error: Exception | None = None


class Children:
    """Processes and what they print. Ctrl+C does not reach them."""

    def __init__(self) -> None:
        self.left: list[str] = []
        """Children that have not ended."""
        self._lines: queue.Queue[Line] = queue.Queue(10_000)
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def start(
        self,
        child: str,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start a command.

        Args:
            child: its name, which stands on its lines.
            argv: the command line.
            stdin: all that it reads, perhaps a secret; None: `send` writes to it later.
            environ: variables that are added to those of this process.
        """
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            argv,
            env={**inherited(), **(environ or {})},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        self._processes[child] = process
        self.left.append(child)

        def read(stream: IO[str], kind: Literal["out", "err"]) -> None:
            for line in stream:
                self.put(Line(child, kind, line.rstrip("\n")))

        errors = threading.Thread(target=read, args=(process.stderr, "err"), daemon=True)
        errors.start()

        def listen(stdout: IO[str]) -> None:
            read(stdout, "out")
            code = process.wait()
            errors.join(timeout=5)
            self.put(Line(child, "end", code=code if code >= 0 else 128 - code))

        threading.Thread(target=listen, args=(process.stdout,), daemon=True).start()
        if stdin is not None:
            self._write(process, stdin)
            self._hang_up(process)

    def add(self, child: str, lines: Iterable[str]) -> None:
        """Take lines that this process makes, in a thread, among those of the children."""

        def pump() -> None:
            error: Exception | None = None
            try:
                for text in lines:
                    self.put(Line(child, "out", text))
            except Exception as caught:  # raised again by who takes the lines
                error = caught
            self.put(Line(child, "end", error=error))

        self.left.append(child)
        threading.Thread(target=pump, daemon=True).start()

    def put(self, line: Line) -> None:
        self._lines.put(line)

    def next(self, timeout_s: float | None) -> Line | None:
        """The next line of any child; None where none comes in time (None: wait for ever)."""
        try:
            line = self._lines.get(block=timeout_s != 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
        if line.kind == "end":
            self.left.remove(line.child)
        return line

    def send(self, text: str) -> None:
        """Write a line to the stdin of all children."""
        for process in self._processes.values():
            self._write(process, f"{text}\n")

    def hang_up(self) -> None:
        """Close the stdin of all children."""
        for process in self._processes.values():
            self._hang_up(process)

    def interrupt(self) -> None:
        """Send SIGINT to those that are left."""
        for child in self.left:
            if (process := self._processes[child]).poll() is None:
                process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill those that are left."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    @staticmethod
    def _write(process: subprocess.Popen[str], text: str) -> None:
        assert process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended: its last line says so
            process.stdin.write(text)
            process.stdin.flush()

    @staticmethod
    def _hang_up(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()


@dataclass(slots=True)
class Ended:
    """Exit code of a command, and what it printed."""

    code: int = 0
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)


def isles_argv(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "isles", *words]


def run_all(
    commands: Mapping[str, Sequence[str]],
    *,
    doing: str,
    print_line: Callable[[str], object],
    show: Callable[[Line], object] = lambda _: None,
    stdin: str = "",
    environs: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Ended]:
    """Run an isles command for each cluster, all at once, to their ends.

    Args:
        commands: the words after `isles`, by the names of the clusters.
        doing: what they do, for the user who waits: `starting`.
        show: called with every line as it comes.

    Raises:
        KeyboardInterrupt: after the commands were interrupted and have ended.
    """
    found = {name: Ended() for name in commands}
    last = dict.fromkeys(commands, "")
    children = Children()
    for name, words in commands.items():
        environ = (environs or {}).get(name)
        children.start(name, isles_argv(words), stdin=stdin, environ=environ)

    def take_one() -> None:
        line = children.next(0.5)
        if line is None:
            return
        show(line)
        ended = found[line.child]
        match line.kind:
            case "out":
                ended.out.append(line.text)
            case "err":
                ended.err.append(line.text)
            case "end":
                ended.code = line.code
        if line.text and not line.text.startswith(STARTED):  # that line is for this process
            last[line.child] = f" (it said: {line.text[:_SHOWN_CHARS].strip()})"

    reported_at = time.monotonic()
    try:
        while children.left:
            take_one()
            if children.left and time.monotonic() - reported_at > _PATIENCE_S:
                reported_at = time.monotonic()
                print_line(
                    f"{doing}: waiting for {', '.join(n + last[n] for n in sorted(children.left))}"
                )
    except KeyboardInterrupt:
        # Nothing that they have begun may go on.
        children.interrupt()
        until = time.monotonic() + _END_S
        while children.left and time.monotonic() < until:
            take_one()
        children.kill()
        raise
    return found

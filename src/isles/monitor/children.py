"""Commands that run beside this one, for each cluster or host: their lines come by one queue."""

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
"""How often the user is told for whom a command waits."""

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
    """Processes that run at the same time, and what they print. Ctrl+C does not reach them."""

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
            stdin: all that it reads, perhaps a secret; None: what `send` gives it later.
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
        self._processes[child] = process
        self.left.append(child)
        threading.Thread(target=self._listen, args=(child, process), daemon=True).start()
        if stdin is not None:
            self.send(stdin, child)
            self.hang_up(child)

    def add(self, child: str, lines: Iterable[str]) -> None:
        """Take lines that this process makes, in a thread, among those of the children."""

        def pump() -> None:
            error: Exception | None = None
            try:
                for text in lines:
                    self._lines.put(Line(child, "out", text))
            except Exception as found:  # raised again by who takes the lines
                error = found
            self._lines.put(Line(child, "end", error=error))

        self.left.append(child)
        threading.Thread(target=pump, daemon=True).start()

    def put(self, line: Line) -> None:
        """Add a line that no child has printed."""
        self._lines.put(line)

    def next(self, timeout_s: float | None) -> Line | None:
        """The next line of any of them; None where none comes in time (None: wait for ever)."""
        try:
            if timeout_s == 0:
                line = self._lines.get_nowait()
            else:
                line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if line.kind == "end":
            self.left.remove(line.child)
        return line

    def send(self, text: str, *children: str) -> None:
        """Write a line to the stdin of some children; of all where none is named."""
        for child in children or tuple(self._processes):
            stdin = self._processes[child].stdin
            assert stdin is not None
            with suppress(OSError, ValueError):  # it has ended: its last line says so
                stdin.write(f"{text}\n" if text else "")
                stdin.flush()

    def hang_up(self, *children: str) -> None:
        """Close the stdin of some children, or of all."""
        for child in children or tuple(self._processes):
            stdin = self._processes[child].stdin
            assert stdin is not None
            with suppress(OSError):
                stdin.close()

    def interrupt(self) -> None:
        """Do to those that are left what Ctrl+C does."""
        for child in self.left:
            if (process := self._processes[child]).poll() is None:
                process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End all that are left at once."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def _listen(self, child: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stderr is not None

        def read(stream: IO[str], kind: Literal["out", "err"]) -> None:
            for line in stream:
                self._lines.put(Line(child, kind, line.rstrip("\n")))

        errors = threading.Thread(target=read, args=(process.stderr, "err"), daemon=True)
        errors.start()
        read(process.stdout, "out")
        code = process.wait()
        errors.join(timeout=5)
        self._lines.put(Line(child, "end", code=code if code >= 0 else 128 - code))


@dataclass(slots=True)
class Ended:
    """A command that has ended: its exit code and what it printed."""

    code: int = 0
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    last: str = ""


def isles_argv(words: Sequence[str]) -> list[str]:
    """The command line of an isles command on this machine."""
    return [sys.executable, "-m", "isles", *words]


def run_all(
    commands: Mapping[str, Sequence[str]],
    *,
    doing: str,
    say: Callable[[str], object],
    show: Callable[[Line], object] = lambda _: None,
    stdin: str = "",
    environs: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Ended]:
    """Run an isles command for each cluster, all at once, to their ends.

    Args:
        commands: the words after `isles`, by the names of the clusters.
        doing: what they do, for the user who waits: `starting`.
        show: given every line as it comes.

    Raises:
        KeyboardInterrupt: as it came; the commands were interrupted, and have ended.
    """
    found = {name: Ended() for name in commands}
    children = Children()
    for name, words in commands.items():
        environ = (environs or {}).get(name)
        children.start(name, isles_argv(words), stdin=stdin, environ=environ)

    def take(line: Line) -> None:
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
            ended.last = f" (it said: {line.text[:_SHOWN_CHARS].strip()})"

    told_at = time.monotonic()
    try:
        while children.left:
            if (line := children.next(0.5)) is not None:
                take(line)
            if children.left and time.monotonic() - told_at > _PATIENCE_S:
                told_at = time.monotonic()
                who = ", ".join(name + found[name].last for name in sorted(children.left))
                say(f"{doing}: waiting for {who}")
    except KeyboardInterrupt:
        # Nothing of what they have begun may go on.
        children.interrupt()
        until = time.monotonic() + _END_S
        while children.left and time.monotonic() < until:
            if (line := children.next(0.5)) is not None:
                take(line)
        children.kill()
        for name in children.left:
            found[name].code = 130
        raise
    return found

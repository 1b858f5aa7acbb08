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
from typing import Literal

from isles.errors import UserError
from isles.run.env import inherited

_PATIENCE_S = 30.0
"""Interval of the lines that list the clusters that a command waits for."""

_END_S = 30.0
"""How long a command may take to end once it was interrupted."""


@dataclass(frozen=True, slots=True)
class ChildLine:
    """A line that a child has printed; or, of kind end, that it has ended."""

    child: str
    kind: Literal["out", "err", "end"]
    text: str = ""
    code: int = 0


class Children:
    """Child processes and their output. Ctrl+C does not reach them."""

    def __init__(self) -> None:
        self.left: list[str] = []
        """Children that have not ended."""
        self._lines: queue.Queue[ChildLine] = queue.Queue(10_000)
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def start(
        self, child: str, argv: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> None:
        """Start a command. `environ` adds variables to the environment of this process."""
        process = subprocess.Popen(
            argv,
            env={**inherited(), **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes[child] = process
        self.left.append(child)
        threading.Thread(target=self._read, args=(child, process), daemon=True).start()

    def _read(self, child: str, process: subprocess.Popen[str]) -> None:
        def read(stream: Iterable[str], kind: Literal["out", "err"]) -> None:
            for line in stream:
                self.put(ChildLine(child, kind, line.rstrip("\n")))

        assert process.stdout is not None and process.stderr is not None
        errors = threading.Thread(target=read, args=(process.stderr, "err"), daemon=True)
        errors.start()
        read(process.stdout, "out")
        code = process.wait()
        errors.join(timeout=5)
        self.put(ChildLine(child, "end", code=code if code >= 0 else 128 - code))

    def put(self, line: ChildLine) -> None:
        self._lines.put(line)

    def next(self, timeout_s: float | None) -> ChildLine | None:
        """The next line of any child; None if none comes in time (`timeout_s` None: no limit)."""
        try:
            line = self._lines.get(block=timeout_s != 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
        if line.kind == "end":
            self.left.remove(line.child)
        return line

    def send(self, text: str, *, is_last: bool = False) -> None:
        """Write to the stdin of all children; `is_last`: and close it."""
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError, ValueError):  # it has ended: its last line says so
                process.stdin.write(text)
                process.stdin.flush()
                if is_last:
                    process.stdin.close()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all remaining children. After SIGKILL, wait for their ends."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)
                if number == signal.SIGKILL:
                    process.wait()


@dataclass(slots=True)
class Ended:
    """Exit code and output of a command that has ended."""

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
    show: Callable[[ChildLine], object] = lambda _: None,
    stdin: str = "",
    environs: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Ended]:
    """Run an isles command for each cluster, in parallel, and wait for all.

    Ctrl+C interrupts them, and is raised again when they have ended.

    Args:
        commands: the words after `isles`, by the names of the clusters.
        doing: description for the waiting user, such as `starting`.
        show: called with each line of output.
    """
    found = {name: Ended() for name in commands}
    children = Children()
    for name, words in commands.items():
        children.start(name, isles_argv(words), (environs or {}).get(name))
    children.send(stdin, is_last=True)

    def take_one() -> None:
        line = children.next(0.5)
        if line is None:
            return
        show(line)
        ended = found[line.child]
        if line.kind == "end":
            ended.code = line.code
        else:
            (ended.out if line.kind == "out" else ended.err).append(line.text)

    reported_at = time.monotonic()
    try:
        while children.left:
            take_one()
            if children.left and time.monotonic() - reported_at > _PATIENCE_S:
                reported_at = time.monotonic()
                print_line(f"{doing}: waiting for {', '.join(sorted(children.left))}")
    except (KeyboardInterrupt, UserError):  # `show` raises the second
        # Nothing that they have begun may go on.
        children.kill(signal.SIGINT)
        until = time.monotonic() + _END_S
        while children.left and time.monotonic() < until:
            with suppress(UserError):
                take_one()
        children.kill()
        raise
    return found

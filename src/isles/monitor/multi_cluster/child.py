"""Commands of isles as processes of their own, one for each cluster, all at once."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Literal

from isles.config.clusters import keys_of_cluster
from isles.launch.remote.passing import STARTED
from isles.run.env import inherited

_PATIENCE_S = 30.0
"""Whom one waits for is told so often."""

_SHOWN = 100
_END_S = 30.0
"""How long a command may take to end once it was interrupted."""


@dataclass(frozen=True, slots=True)
class Word:
    """A line that a command has printed, or that it has ended, with its exit code."""

    cluster: str
    kind: Literal["out", "err", "end"]
    text: str
    code: int = 0


Said = queue.Queue[Word]


class Child:
    """One command for one cluster; what it says goes into a queue. Ctrl+C does not reach it.

    Args:
        cluster: its name.
        words: the verb and what follows it.
        said: takes its lines, and its end.
        given: what it reads from stdin, a secret perhaps; None: orders come later, by `tell`.
        environ: variables that are added to this process' own.
        index: its place in the run file, by which its errors name its keys.
    """

    def __init__(
        self,
        cluster: str,
        words: Sequence[str],
        said: Said,
        *,
        given: str | None = "",
        environ: Mapping[str, str] | None = None,
        index: int = 0,
    ) -> None:
        self.cluster = cluster
        self._index = index
        self._said = said
        self._process = subprocess.Popen(
            [sys.executable, "-m", "isles", *words],
            env={**inherited(), **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        if given is not None:
            self.tell(given)
            self.hang_up()

    def tell(self, word: str) -> None:
        """A line for its stdin."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended: its end is told
            self._process.stdin.write(f"{word}\n" if word else "")
            self._process.stdin.flush()

    def hang_up(self) -> None:
        """Close its stdin."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def interrupt(self) -> None:
        """As Ctrl+C."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        errors = threading.Thread(
            target=self._read, args=(self._process.stderr, "err"), daemon=True
        )
        errors.start()
        self._read(self._process.stdout, "out")
        code = self._process.wait()
        errors.join(timeout=5)
        self._said.put(Word(self.cluster, "end", "", code if code >= 0 else 128 - code))

    def _read(self, stream: IO[str], kind: Literal["out", "err"]) -> None:
        for line in stream:
            text = line.rstrip("\n")
            text = keys_of_cluster(text, self._index) if kind == "err" else text
            self._said.put(Word(self.cluster, kind, text))


@dataclass(slots=True)
class Ended:
    """A command that has ended: its exit code and what it printed."""

    code: int = 0
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    last: str = ""

    @property
    def lately(self) -> str:
        """Its last words, for who waits for it."""
        return f" (it said: {self.last[:_SHOWN].strip()})" if self.last else ""


def run_all(
    commands: Mapping[str, Sequence[str]],
    *,
    doing: str,
    say: Callable[[str], object],
    hear: Callable[[Word], object] = lambda _: None,
    given: str = "",
    environs: Mapping[str, Mapping[str, str]] | None = None,
    order: Sequence[str] = (),
) -> dict[str, Ended]:
    """Run a command for each cluster, all at once, to their ends.

    Args:
        commands: by the names of the clusters.
        doing: what they do, for who waits: `starting`.
        say: told now and then who is waited for.
        hear: told every line as it comes.
        given: what each reads from stdin.
        environs: variables, by the names of the clusters.
        order: the names of all clusters of the run file.

    Raises:
        KeyboardInterrupt: as it came; the commands were interrupted, and have ended.
    """
    said: Said = queue.Queue()
    found = {name: Ended() for name in commands}
    children = {
        name: Child(
            name,
            words,
            said,
            given=given,
            environ=(environs or {}).get(name),
            index=order.index(name) if name in order else 0,
        )
        for name, words in commands.items()
    }
    left, told_at = set(commands), time.monotonic()
    try:
        while left:
            word = _next(said, 0.5)
            if word is not None:
                hear(word)
                _keep(found[word.cluster], word)
                left -= {word.cluster} if word.kind == "end" else set()
            if left and time.monotonic() - told_at > _PATIENCE_S:
                told_at = time.monotonic()
                who = ", ".join(name + found[name].lately for name in sorted(left))
                say(f"{doing}: waiting for {who}")
    except KeyboardInterrupt:
        _end(children, left, said, found, hear)
        raise
    return found


def _next(said: Said, timeout_s: float) -> Word | None:
    try:
        return said.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _keep(ended: Ended, word: Word) -> None:
    if not word.text.startswith(STARTED):  # that is for us
        ended.last = word.text or ended.last
    match word.kind:
        case "out":
            ended.out.append(word.text)
        case "err":
            ended.err.append(word.text)
        case "end":
            ended.code = word.code


def _end(
    children: Mapping[str, Child],
    left: set[str],
    said: Said,
    found: Mapping[str, Ended],
    hear: Callable[[Word], object],
) -> None:
    """Let commands end as by Ctrl+C, so that nothing of what they have begun goes on."""
    for name in left:
        children[name].interrupt()
    until = time.monotonic() + _END_S
    while left and time.monotonic() < until:
        word = _next(said, 0.5)
        if word is not None:
            hear(word)
            _keep(found[word.cluster], word)
            left -= {word.cluster} if word.kind == "end" else set()
    for name in left:
        children[name].kill()
    for name in left:
        found[name].code = 130

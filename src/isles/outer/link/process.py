"""One side process, from its start to its end: lines to it and from it, and whether it lives."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from isles.outer.link.messages import (
    COMMANDS,
    EVENTS,
    Alive,
    Command,
    Event,
    Progress,
)
from isles.outer.link.settings import LinkSettings

log = logging.getLogger(__name__)

_TICK_S = 1.0
_MISSED_TICKS = 5
_START_S = 180.0
"""So long a start may take: imports from a busy file system."""
_TAIL_BYTES = 2000


class SideProcess:
    """A side process. It ends when this process does, however that may happen.

    Args:
        log_file: for what it says on stderr.
        settings: when it counts as frozen.
        progress: what it is told for its signs of life.
    """

    def __init__(
        self, log_file: Path, settings: LinkSettings, progress: Callable[[], Progress]
    ) -> None:
        self._frozen_s, self._progress = settings.frozen_s, progress
        self._log_file = log_file
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        with log_file.open("ab") as stderr:
            self._log_start = stderr.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "isles.outer.side"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.pid = self._process.pid
        self._heard = time.monotonic()
        self._has_spoken = False
        self._why = ""

    def send(self, command: Command) -> None:
        """Say something; never waits."""
        self._commands.put(command)

    def attend(self, take: Callable[[Event | Alive], None]) -> str:
        """Hear it until its end.

        Args:
            take: gets each event.

        Returns:
            How it ended, in words.
        """
        writer = threading.Thread(target=self._write, name="link-writer", daemon=True)
        writer.start()
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            self._heard, self._has_spoken = time.monotonic(), True
            try:
                event = EVENTS.validate_json(line)
            except ValidationError:
                if line.endswith(b"\n"):
                    log.warning("the side process says what is no event: %r", line[:200])
                continue
            take(event)
        code = self._process.wait()
        self._commands.put(None)
        writer.join()
        return f"the side process {self._ending(code)}"

    def _write(self) -> None:
        """Pass commands on; every second, look whether the other end lives."""
        stdin = self._process.stdin
        assert stdin is not None
        told = Progress()
        awake = time.monotonic()
        # A pipe that is full must not keep this thread from finding out that its reader is frozen.
        lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        pipe = threading.Thread(target=_drain, args=(lines, stdin), daemon=True)
        pipe.start()
        while True:
            with suppress(queue.Empty):
                command = self._commands.get(timeout=_TICK_S)
                if command is None:
                    break
                lines.put(COMMANDS.dump_json(command) + b"\n")
            now = time.monotonic()
            if now - awake > _MISSED_TICKS * _TICK_S:
                self._heard = now  # it was this process that stood still
            awake = now
            limit_s = self._frozen_s if self._has_spoken else max(_START_S, self._frozen_s)
            if now - self._heard > limit_s:
                self._why = f"had said nothing for {limit_s:g} s, and was ended"
                self._process.kill()
            if (progress := self._progress()) != told:
                told = progress
                lines.put(COMMANDS.dump_json(progress) + b"\n")
        lines.put(None)
        pipe.join()

    def end(self, timeout_s: float) -> None:
        """Let it end by itself for so long; then end it."""
        with suppress(subprocess.TimeoutExpired):
            if timeout_s > 0:
                self._process.wait(timeout_s)
        if self._process.poll() is None:
            self._process.kill()

    def _ending(self, code: int) -> str:
        if self._why:
            return self._why
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            how = f"was ended by {name}"
        else:
            how = f"has ended with exit code {code}"
        last = self._last_words()
        return f"{how} ({last})" if last else how

    def _last_words(self) -> str:
        """The last line that it wrote to its log."""
        with suppress(OSError), self._log_file.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(self._log_start, end - _TAIL_BYTES))
            lines = stream.read().decode(errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            return said[-1][:300] if said else ""
        return ""


def _drain(lines: queue.SimpleQueue[bytes | None], pipe: IO[bytes]) -> None:
    """Write lines to a pipe; once its reader is gone, forget them."""
    with suppress(OSError, ValueError):
        while (line := lines.get()) is not None:
            pipe.write(line)
            pipe.flush()
    with suppress(OSError, ValueError):
        pipe.close()

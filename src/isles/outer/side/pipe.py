"""The pipe to rank 0, as the side process sees it: when it ends, so does this process."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import BinaryIO

from isles.outer.link.messages import COMMANDS, EVENTS, Alive, Begin, Command, Event


class Pipe:
    """Lines from rank 0 and to it; no stray print can come between them."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._in: BinaryIO = sys.stdin.buffer
        self._lock = threading.Lock()

    def begin(self) -> Begin | None:
        """The first line; None: there is nobody at the other end."""
        line = self._in.readline()
        if not line:
            return None
        command = COMMANDS.validate_json(line)
        assert isinstance(command, Begin), command.kind
        return command

    def listen(self) -> asyncio.Queue[Command]:
        """From here on commands come into a queue, and this process ends with rank 0."""
        loop = asyncio.get_running_loop()
        commands: asyncio.Queue[Command] = asyncio.Queue()

        def read() -> None:
            for line in self._in:
                if line.endswith(b"\n"):
                    command = COMMANDS.validate_json(line)
                    loop.call_soon_threadsafe(commands.put_nowait, command)
            # Not an exception: a thread within gloo must not keep this process alive.
            os._exit(0)

        threading.Thread(target=read, name="pipe", daemon=True).start()
        return commands

    def emit(self, event: Event | Alive) -> None:
        """Tell rank 0."""
        line = EVENTS.dump_json(event) + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._out, line) :]

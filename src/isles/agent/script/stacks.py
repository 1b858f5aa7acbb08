"""The stacks of a script's process, read from outside: also of one that hangs or is frozen."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from isles.run.stack_words import Frame, collective_in, place_in_words

RUNNER = Path(__file__).with_name("main.py")

_WAIT_S = 2.0
_QUIET_S = 0.2
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+|\?\?\?) in (.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x")
_FROZEN = ("T", "t")

Answer = dict[str, str]
"""at: the place in words. waits_in: the collective operation it waits in. stacks: of all threads.
frozen: why it cannot go on by itself, or empty."""


class ScriptStacks:
    """Asks one script for its stacks. It must be started by `command`, and keep `fd` and `gate`."""

    def __init__(self) -> None:
        """Opens the file that Python writes the stacks to, in memory where that can be."""
        if sys.platform == "linux":
            self.fd = os.memfd_create("isles-stacks")
        else:
            with tempfile.TemporaryFile() as stream:
                self.fd = os.dup(stream.fileno())
        # The script waits until the other end has given it a byte, and ends where that is closed.
        self.gate, self._opener = os.pipe()

    def command(self, script: str, arguments: list[str]) -> list[str]:
        """The command line of the script's process."""
        return [sys.executable, "-u", str(RUNNER), str(self.fd), str(self.gate), script, *arguments]

    def open_gate(self) -> None:
        """Let the script run: whatever must be there before it is there."""
        os.write(self._opener, b"\n")

    def close(self) -> None:
        """No more questions."""
        for fd in (self.fd, self.gate, self._opener):
            os.close(fd)

    def ask(self, pid: int) -> Answer:
        """Where the script's process stands now. Takes up to two seconds."""
        state = _state(pid)
        if state in _FROZEN:
            frozen = "it is frozen: stopped by SIGSTOP or held by a debugger"
            return {"at": "", "waits_in": "", "stacks": f"{frozen}\n", "frozen": frozen}
        text = self._dump(pid)
        stack = main_stack(text)
        at = place_in_words(stack) if text else "where it gives no stacks"
        if state == "D":
            at += ", waiting for a disk or a driver in the kernel"
        waits_in = collective_in(stack, is_gpu=True)
        return {"at": at, "waits_in": waits_in, "stacks": text, "frozen": ""}

    def _dump(self, pid: int) -> str:
        if not self._hears(pid):
            return ""
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)  # its own place in the file too
        try:
            os.kill(pid, signal.SIGRTMAX - 5)
        except ProcessLookupError:
            return ""
        deadline, size, since = time.monotonic() + _WAIT_S, 0, time.monotonic()
        while time.monotonic() < deadline:
            now = os.fstat(self.fd).st_size
            if now != size:
                size, since = now, time.monotonic()
            elif size and time.monotonic() - since > _QUIET_S:
                break
            time.sleep(_QUIET_S / 4)
        return os.pread(self.fd, size, 0).decode("utf-8", errors="replace")

    def _hears(self, pid: int) -> bool:
        """Whether the signal would lead to stacks, in this file, and not end the process."""
        with suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
            caught = next(line for line in lines.splitlines() if line.startswith("SigCgt:"))
            if not int(caught.split()[1], 16) >> (signal.SIGRTMAX - 6) & 1:
                return False
            theirs, mine = Path(f"/proc/{pid}/fd/{self.fd}").stat(), os.fstat(self.fd)
            return (theirs.st_dev, theirs.st_ino) == (mine.st_dev, mine.st_ino)
        return False


def main_stack(text: str) -> list[Frame]:
    """The main thread's frames in what Python's faulthandler has written, the innermost last."""
    stack: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stack = []  # the oldest thread comes last
        elif found := _FRAME.match(line):
            number = int(found[2]) if found[2].isdigit() else 0
            stack.append((found[1], number, found[3]))
    own = str(RUNNER)
    return [frame for frame in reversed(stack) if frame[0] != own]


def _state(pid: int) -> str:
    """The kernel's letter for what the process does; empty where it cannot be known."""
    with suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0]
    return ""

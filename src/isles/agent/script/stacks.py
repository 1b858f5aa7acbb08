"""Stacks of the processes of a user's own script, read by the agent of their node. Linux only.

Python writes them to a file in memory that each script has open; see `main.py`.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from isles.run.hang import Frame, collective_in, place_in_words

RUNNER = Path(__file__).with_name("main.py")

ENDED = "its process has ended"
"""Place of a rank whose script is over."""

_FILE = "isles-stacks"
_WAIT_S, _QUIET_S = 2.0, 0.2
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+|\?\?\?) in (.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x")

Answer = dict[str, str]
"""at: place in the code. waits_in: collective operation that it waits for. stacks: of all threads.
frozen: why it cannot continue by itself, or empty."""


def open_file() -> int:
    """A file descriptor of an empty file for the stacks of one script, which must inherit it."""
    if sys.platform != "linux":
        return os.open(os.devnull, os.O_WRONLY)
    file = os.memfd_create(_FILE)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # it is emptied before each request
    return file


def read_stacks(scripts: Mapping[int, tuple[int, int]]) -> dict[int, Answer]:
    """Current places of scripts in their code. Takes up to two seconds.

    Args:
        scripts: for each rank, the pid of its script and the descriptor of its file there.
    """
    states = {rank: _state(pid) for rank, (pid, _) in scripts.items()}
    files = {}
    for rank, (pid, fd) in scripts.items():
        if states[rank] not in ("T", "t") and (file := _ask(pid, fd)) is not None:
            files[rank] = file
    sizes: dict[int, int] = {}
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        before, sizes = sizes, {rank: os.fstat(file).st_size for rank, file in files.items()}
        if all(sizes.values()) and sizes == before:
            break
        time.sleep(_QUIET_S)
    answers = {}
    for rank, state in states.items():
        text = ""
        if rank in files:
            text = os.pread(files[rank], sizes[rank], 0).decode("utf-8", errors="replace")
            os.close(files[rank])
        answers[rank] = _answer(state, text)
    return answers


def _answer(state: str, text: str) -> Answer:
    if state in ("T", "t"):
        frozen = "frozen (stopped by SIGSTOP or held by a debugger)"
        return {"at": "", "waits_in": "", "stacks": f"{frozen}\n", "frozen": frozen}
    if state in ("", "Z", "X"):
        return {"at": ENDED, "waits_in": "", "stacks": f"{ENDED}\n", "frozen": ""}
    stack = _main_stack(text)
    at = place_in_words(stack) if text else "at an unknown place (no stacks)"
    if state == "D":
        at += ", waiting for a disk or a driver in the kernel"
    return {"at": at, "waits_in": collective_in(stack, is_gpu=True), "stacks": text, "frozen": ""}


def _state(pid: int) -> str:
    # The kernel's letter for the state of the process; empty if it has ended.
    with suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0]
    return ""


def _ask(pid: int, fd: int) -> int | None:
    # The file, after the request; None if the signal would not write stacks to this file, or would
    # kill the process.
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        caught = next(line for line in lines.splitlines() if line.startswith("SigCgt:"))
        place = Path(f"/proc/{pid}/fd/{fd}")
        is_caught = int(caught.split()[1], 16) >> (signal.SIGRTMAX - 6) & 1
        if is_caught and str(place.readlink()).startswith(f"/memfd:{_FILE}"):
            file = os.open(place, os.O_RDWR)
            os.ftruncate(file, 0)
            os.kill(pid, signal.SIGRTMAX - 5)
            return file
    return None


def _main_stack(text: str) -> list[Frame]:
    # The main thread's frames in the output of Python's faulthandler, innermost last.
    stack: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stack = []  # the oldest thread is last
        elif found := _FRAME.match(line):
            number = int(found[2]) if found[2].isdecimal() else 0
            stack.append((found[1], number, found[3]))
    return [frame for frame in reversed(stack) if frame[0] != str(RUNNER)]

"""Where a rank stands: the stacks of its threads, the place in words, and what it waits in."""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from isles.run.hang import Frame, collective_in, place_in_words


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands.

    Args:
        at: in words, such as `at my_data.py:88 read()`.
        waits_in: the collective operation that it waits in for the others; empty: in none, as far
            as its stack tells.
        stacks: of all its threads, the main thread first.
    """

    at: str
    waits_in: str
    stacks: str

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def place_now(main: int, *, is_gpu: bool) -> Place:
    """Where this process stands. Called from a thread that is not the main one.

    Args:
        main: the main thread's ident.
        is_gpu: whether it computes on a GPU, whose results a thread may wait for.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stack = _stack(frames.get(main))
    waits_in = collective_in(stack, is_gpu=is_gpu)
    leaf = stack
    if not waits_in and stack and "/concurrent/futures/" in _innermost_file(stack):
        # It waits for the thread that reads the data ahead: there is the place.
        ahead = [ident for ident, name in names.items() if name.startswith("data")]
        leaf = _stack(frames.get(ahead[0])) if ahead and ahead[0] is not None else stack
    own = threading.get_ident()
    order = [main, *(ident for ident in frames if ident not in (main, own))]
    texts = [_text(names.get(ident, str(ident)), frames.get(ident)) for ident in order]
    return Place(place_in_words(leaf), waits_in, "\n".join(texts))


def flight_record() -> str:
    """What NCCL's flight recorder knows, as JSON; empty where there is none."""
    with suppress(Exception):  # a private function of torch, which may go
        from torch._C import _distributed_c10d

        dump: Any = _distributed_c10d
        text = dump._dump_nccl_trace_json(includeCollectives=True, onlyActive=True)
        return text.decode() if isinstance(text, bytes) else str(text)
    return ""


def _stack(frame: FrameType | None) -> list[Frame]:
    """The frames of a thread, the innermost last."""
    if frame is None:
        return []
    found = traceback.extract_stack(frame)
    return [(entry.filename, entry.lineno or 0, entry.name) for entry in found]


def _text(name: str, frame: FrameType | None) -> str:
    lines = traceback.format_stack(frame) if frame is not None else ["  it has no Python frame\n"]
    return f"thread {name}:\n{''.join(lines)}"


def _innermost_file(stack: list[Frame]) -> str:
    """Of the innermost frame that is not Python's own waiting."""
    for file, _, _ in reversed(stack):
        if not file.endswith("/threading.py"):
            return file
    return ""

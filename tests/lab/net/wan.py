#!/usr/bin/env python3
"""A long link between two bridges, in user space: its delay, and whether it is up.

    wan.py TAP_A TAP_B CONTROL.json

Stands for `tc netem` where the kernel has none. It runs in the network namespace of the bridges,
each of which has one of the TAP devices. CONTROL.json holds up and delay_ms (one way); it is read
again when it changes.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import select
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LOOK_S = 0.05
_BURST = 64
_MAX_FRAME = 65600


@dataclass
class Direction:
    """Frames on their way from one TAP device to the other, each with the time of its arrival."""

    source: int
    target: int
    waiting: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)

    def deliver(self, now: float) -> float:
        """Pass on what has arrived; seconds until the next does."""
        while self.waiting and self.waiting[0][0] <= now:
            with suppress(OSError):
                os.write(self.target, self.waiting.popleft()[1])
        return max(0.0, self.waiting[0][0] - now) if self.waiting else _LOOK_S

    def take(self, is_up: bool, arrival: float) -> None:
        """Read what has been sent, and give it its time of arrival, or drop it."""
        for _ in range(_BURST):
            try:
                frame = os.read(self.source, _MAX_FRAME)
            except BlockingIOError:
                return
            if is_up:
                self.waiting.append((arrival, frame))


def tap(name: str) -> int:
    """Open a TAP device that is there."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle


def main(name_a: str, name_b: str, control: str) -> None:
    """Carry frames until this process is ended."""
    path, given, read_at, changed = Path(control), {}, 0.0, 0
    a, b = tap(name_a), tap(name_b)
    directions = {a: Direction(a, b), b: Direction(b, a)}
    while True:
        now = time.monotonic()
        if now - read_at > _LOOK_S:
            read_at = now
            with suppress(OSError, ValueError):
                if path.stat().st_mtime_ns != changed:
                    given, changed = json.loads(path.read_text()), path.stat().st_mtime_ns
        wait_s = min(direction.deliver(now) for direction in directions.values())
        ready, _, _ = select.select((a, b), (), (), wait_s)
        arrival = time.monotonic() + given.get("delay_ms", 0) / 1e3
        for handle in ready:
            directions[handle].take(given.get("up", True), arrival)


if __name__ == "__main__":
    main(*sys.argv[1:4])

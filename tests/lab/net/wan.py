#!/usr/bin/env python3
"""A slow link between two bridges, in user space: rate, delay, jitter, loss, cut.

    wan.py TAP_A TAP_B CONTROL.json

Stands for `tc netem` where the kernel has none. It runs in the network namespace of the bridges,
each of which has one of the TAP devices. CONTROL.json holds any of up, rate_mbit, delay_ms (one
way), jitter_ms, loss (a share) and queue_ms; it is read again when it changes.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import random
import select
import signal
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
class Link:
    """How the link is now; times in seconds, rate in bytes a second, 0: without limit."""

    up: bool = True
    rate: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    queue: float = 0.1

    @classmethod
    def read(cls, path: Path) -> Link:
        """From the control file."""
        given = json.loads(path.read_text())
        return cls(
            up=given.get("up", True),
            rate=given.get("rate_mbit", 0) * 1e6 / 8,
            delay=given.get("delay_ms", 0) / 1e3,
            jitter=given.get("jitter_ms", 0) / 1e3,
            loss=given.get("loss", 0.0),
            queue=given.get("queue_ms", 100) / 1e3,
        )


@dataclass
class Direction:
    """Frames on their way from one TAP device to the other, each with the time of its arrival."""

    source: int
    target: int
    waiting: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)
    free_at: float = 0.0
    """When the line has sent what it was given."""

    def deliver(self, link: Link, now: float) -> float:
        """Pass on what has arrived; seconds until the next does."""
        while self.waiting and self.waiting[0][0] <= now:
            _, frame = self.waiting.popleft()
            if link.up:
                with suppress(OSError):
                    os.write(self.target, frame)
        return max(0.0, self.waiting[0][0] - now) if self.waiting else _LOOK_S

    def take(self, link: Link, now: float) -> None:
        """Read what has been sent, and give each frame its time of arrival, or drop it."""
        for _ in range(_BURST):
            try:
                frame = os.read(self.source, _MAX_FRAME)
            except BlockingIOError:
                return
            if not link.up or (link.loss and random.random() < link.loss):
                continue
            arrives = now + link.delay
            if link.rate:
                begins = max(self.free_at, now)
                if begins - now > link.queue:
                    continue  # the queue is full
                self.free_at = begins + len(frame) / link.rate
                arrives = self.free_at + link.delay
            if link.jitter:
                # Frames are late by chance, and never overtake one another.
                last = self.waiting[-1][0] if self.waiting else 0.0
                arrives = max(arrives + random.random() * link.jitter, last)
            self.waiting.append((arrives, frame))


def tap(name: str) -> int:
    """Open a TAP device that is there."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle


def main(name_a: str, name_b: str, control: str) -> None:
    """Carry frames until SIGTERM."""
    path, link, read_at, changed = Path(control), Link(), 0.0, 0
    a, b = tap(name_a), tap(name_b)
    directions = {a: Direction(a, b), b: Direction(b, a)}
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    while not stopping:
        now = time.monotonic()
        if now - read_at > _LOOK_S:
            read_at = now
            with suppress(OSError, ValueError):
                if path.stat().st_mtime_ns != changed:
                    link, changed = Link.read(path), path.stat().st_mtime_ns
        wait_s = min(direction.deliver(link, now) for direction in directions.values())
        ready, _, _ = select.select((a, b), (), (), wait_s)
        now = time.monotonic()
        for handle in ready:
            directions[handle].take(link, now)


if __name__ == "__main__":
    main(*sys.argv[1:4])

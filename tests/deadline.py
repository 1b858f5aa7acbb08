"""The deadline of whatever a test waits for: a condition, threads, or the end of a program."""

from __future__ import annotations

import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 600.0
"""Of a machine whose cores others keep busy: who reaches it has met a fault. A time that is
promised to people is no deadline: its test passes a clock in."""


def until(condition: Callable[[], T], what: str | Callable[[], str] = "") -> T:
    """Look again and again until a condition holds, for as long as the deadline; its answer."""
    end = time.monotonic() + DEADLINE_S
    while True:
        began = time.monotonic()
        if found := condition():
            return found
        now = time.monotonic()
        text = what if isinstance(what, str) or now < end else what()
        assert now < end, f"not within {DEADLINE_S:.0f} s: {text}"
        # As long as the look took: it must not take from others the time that they need.
        select.select([], [], [], min(1.0, max(0.01, now - began)))


def at_once(num: int, work: Callable[[], object]) -> None:
    """Let threads begin the same work at one moment, and wait for their end."""
    barrier = threading.Barrier(num)

    def one() -> None:
        barrier.wait(DEADLINE_S)
        work()

    threads = [threading.Thread(target=one) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)


def run_program(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, within the deadline; its output is kept as text."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        input=input,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

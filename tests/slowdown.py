"""Makes processes slower from outside: stops and continues them many times a second.

    python tests/slowdown.py PERIOD_S PID:FACTOR [PID:FACTOR …]

A process with factor 3 runs for a third of each period; the turns of several follow one another, so
that those which share a core do not also slow each other. Ends when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

PERIOD_S = 0.012


def main(arguments: list[str]) -> None:
    """Stop and continue until standard input ends or all processes have."""
    period_s = float(arguments[0])
    turns: list[tuple[float, int, signal.Signals]] = []
    begins = 0.0
    for argument in arguments[1:]:
        pid, factor = argument.split(":")
        ends = begins + 1 / float(factor)
        turns += [(begins % 1, int(pid), signal.SIGCONT), (ends % 1, int(pid), signal.SIGSTOP)]
        begins = ends
    turns.sort()
    first = time.monotonic()
    try:
        for number in range(10**9):
            for offset, pid, sign in turns:
                wait_s = first + (number + offset) * period_s - time.monotonic()
                if select.select([sys.stdin], [], [], max(0.0, wait_s))[0]:
                    return
                os.kill(pid, sign)
    except ProcessLookupError:
        pass  # it has ended, and with it what it was slowed for
    finally:
        for _, pid, _ in turns:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def slowed(factors: Mapping[int, float], period_s: float = PERIOD_S) -> Iterator[None]:
    """Slow processes down, by their ids, inside a `with`."""
    pairs = [f"{pid}:{factor}" for pid, factor in factors.items() if factor > 1]
    command = [sys.executable, __file__, str(period_s), *pairs]
    supervisor = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        supervisor.wait(10)
        for pid in factors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What runs on a node while it is checked: `python -m isles.check.node.operations`.

As `isles.launch.node.operations`, with more that it can be asked. It ends with its stdin, or when
nobody has asked it for a while (the machine that did may have lost its network), and its ranks
with it: nothing is left behind.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from isles.check.node.files import files, hub, probe_read, probe_remove, probe_write
from isles.check.node.gpus import gpus
from isles.check.node.machine import clock, machine
from isles.check.node.network import Listener, bandwidth, dial, reach, resolve
from isles.check.node.ranks import Ranks
from isles.check.node.smoke import smoke
from isles.launch.node.operations import Operation, operations, serve

_IDLE_S = 120.0


def check_operations(ranks: Ranks) -> dict[str, Operation]:
    """Everything that a check asks of a node."""
    listener = Listener()
    return {
        "facts": operations()["facts"],
        "clock": clock,
        "machine": machine,
        "gpus": gpus,
        "files": files,
        "hub": hub,
        "probe_write": probe_write,
        "probe_read": probe_read,
        "probe_remove": probe_remove,
        "dial": dial,
        "resolve": resolve,
        "listen": listener.listen,
        "unlisten": listener.unlisten,
        "reach": reach,
        "bandwidth": bandwidth,
        "ranks": ranks.start,
        "reduce": ranks.reduce,
        "end_ranks": ranks.end,
        "smoke": smoke,
    }


class Attention:
    """Whether anybody still asks.

    Args:
        idle_s: after so long without a question it is over.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._asked_at = time.monotonic()
        self._num_at_work = 0
        self._lock = threading.Lock()

    def watched(self, work: Operation) -> Operation:
        """The operation, noticed."""

        def wrapped(args: dict[str, Any]) -> dict[str, Any]:
            with self._lock:
                self._num_at_work += 1
            try:
                return work(args)
            finally:
                with self._lock:
                    self._num_at_work -= 1
                    self._asked_at = time.monotonic()

        return wrapped

    def end_when_over(self, ranks: Ranks) -> None:
        """Look now and then, for ever; end this process when it is over."""
        while True:
            time.sleep(self._idle_s / 10)
            with self._lock:
                is_idle = self._num_at_work == 0
                is_over = is_idle and time.monotonic() - self._asked_at > self._idle_s
            if is_over:
                ranks.kill()
                os._exit(1)


def main(idle_s: float = _IDLE_S) -> None:
    """Answer until stdin is closed, and leave nothing behind."""
    ranks, attention = Ranks(), Attention(idle_s)
    threading.Thread(target=attention.end_when_over, args=(ranks,), daemon=True).start()
    known = {op: attention.watched(work) for op, work in check_operations(ranks).items()}
    code = serve(known)
    ranks.kill()
    os._exit(code)


if __name__ == "__main__":
    main()

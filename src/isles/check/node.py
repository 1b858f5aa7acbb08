"""What runs on a node while it is checked: `python -m isles.check.node`.

As `isles.launch.ssh.node`, with more that it can be asked. It ends with its stdin, or when
nobody has asked it for a while (the machine that did may have lost its network), and its ranks
with it: nothing is left behind.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from isles.check.checks.files import files, hub, probe_read, probe_remove, probe_write
from isles.check.checks.gpus import gpus
from isles.check.checks.links import Listener, bandwidth, reach
from isles.check.checks.machine import machine
from isles.check.checks.network import dial, firewalls, interfaces, resolve
from isles.check.checks.ranks import Ranks, smoke
from isles.check.finding import Finding
from isles.check.plan import NodePlan
from isles.launch.ssh.channel import Operation, serve
from isles.launch.ssh.facts import node_facts

_IDLE_S = 120.0

Check = Callable[[NodePlan], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "machine": machine,
    "gpus": gpus,
    "files": files,
    "hub": hub,
    "smoke": smoke,
}
"""What a node finds by itself; each takes a `plan`, and answers with `findings`."""


def check_operations(ranks: Ranks) -> dict[str, Operation]:
    """Everything that a check asks of a node."""
    listener = Listener()
    asked: dict[str, Callable[..., dict[str, Any]]] = {
        "facts": _facts,
        "clock": lambda: {"now": time.time()},
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
    }
    asked |= {name: partial(_findings, check) for name, check in CHECKS.items()}
    return {name: partial(_call, work) for name, work in asked.items()}


def _call(work: Callable[..., dict[str, Any]], args: dict[str, Any]) -> dict[str, Any]:
    return work(**args)


def _findings(check: Check, plan: dict[str, Any]) -> dict[str, Any]:
    return {"findings": [asdict(finding) for finding in check(NodePlan(**plan))]}


def _facts(**args: Any) -> dict[str, Any]:
    own = [asdict(interface) for interface in interfaces()]
    return {**node_facts(args), "interfaces": own, "firewalls": firewalls()}


def main(idle_s: float = _IDLE_S) -> None:
    """Answer until stdin is closed, or nobody has asked for `idle_s`; leave nothing behind."""
    ranks = Ranks()
    at_work: set[object] = set()
    asked_at = time.monotonic()

    def watched(work: Operation) -> Operation:
        def wrapped(args: dict[str, Any]) -> dict[str, Any]:
            nonlocal asked_at
            question = object()
            at_work.add(question)
            try:
                return work(args)
            finally:
                asked_at = time.monotonic()
                at_work.discard(question)

        return wrapped

    def end_when_idle() -> None:
        while at_work or time.monotonic() - asked_at < idle_s:
            time.sleep(idle_s / 10)
        ranks.kill()
        os._exit(1)

    threading.Thread(target=end_when_idle, daemon=True).start()
    code = serve({op: watched(work) for op, work in check_operations(ranks).items()})
    ranks.kill()
    os._exit(code)


if __name__ == "__main__":
    main()

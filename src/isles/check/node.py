"""Process on a node during a check: `python -m isles.check.node`.

It answers queries like `isles.launch.ssh.node`, and has the operations of a check. It ends when its
stdin closes, or after a while without queries, as the network of the other machine may be down. Its
ranks end with it, so nothing is left behind.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from isles.check.checks.files import files, huggingface, probe_read, probe_remove, probe_write
from isles.check.checks.gpus import gpus
from isles.check.checks.links import Listener, bandwidth, keep_pairs, reach
from isles.check.checks.machine import machine
from isles.check.checks.network import dial, dial_bucket, firewalls, interfaces
from isles.check.checks.ranks import CheckRanks, smoke
from isles.check.checks.rows import rows
from isles.check.checks.topology import topology
from isles.check.finding import Finding
from isles.check.plan import NodePlan
from isles.launch.ssh.channel import serve
from isles.launch.ssh.facts import node_facts

IDLE_S = 120.0
"""A node without queries for this time exits."""

Check = Callable[[NodePlan], Iterator[Finding]]
Work = Callable[..., dict[str, Any]]

CHECKS: dict[str, Check] = {
    "machine": machine,
    "gpus": gpus,
    "topology": topology,
    "files": files,
    "huggingface": huggingface,
    "rows": rows,
    "smoke": smoke,
}
"""Checks of a single node: operations that take a `plan`, and return `findings`."""


def answer(more: Mapping[str, Work], *, idle_s: float = IDLE_S) -> None:
    """Answer the queries of a check on stdin until stdin closes. Then stop the ranks.

    Args:
        more: further operations, by name.
        idle_s: time without queries after which the process exits immediately.
    """
    ranks, listener = CheckRanks(), Listener()
    known: dict[str, Work] = {
        "facts": _facts,
        "clock": lambda: {"now": time.time()},
        "probe_write": probe_write,
        "probe_read": probe_read,
        "probe_remove": probe_remove,
        "dial": dial,
        "dial_bucket": dial_bucket,
        "listen": listener.listen,
        "unlisten": listener.unlisten,
        "reach": reach,
        "bandwidth": bandwidth,
        "keep_pairs": keep_pairs,
        "ranks": ranks.start,
        "reduce": ranks.reduce,
        "end_ranks": ranks.end,
        **{name: _findings_of(check) for name, check in CHECKS.items()},
        **more,
    }
    at_work: set[object] = set()
    asked_at = time.monotonic()

    def watched(work: Work) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def call(args: dict[str, Any]) -> dict[str, Any]:
            nonlocal asked_at
            question = object()
            at_work.add(question)
            try:
                return work(**args)
            finally:
                asked_at = time.monotonic()
                at_work.discard(question)

        return call

    def end_when_idle() -> None:
        while at_work or time.monotonic() - asked_at < idle_s:
            time.sleep(idle_s / 10)
        ranks.kill()
        os._exit(1)

    threading.Thread(target=end_when_idle, daemon=True).start()
    serve({op: watched(work) for op, work in known.items()})
    ranks.kill()


def _findings_of(check: Check) -> Work:
    return lambda plan: {"findings": [asdict(finding) for finding in check(NodePlan(**plan))]}


def _facts(**args: Any) -> dict[str, Any]:
    own = [asdict(interface) for interface in interfaces()]
    return {**node_facts(args), "interfaces": own, "firewalls": firewalls()}


if __name__ == "__main__":
    answer({})
    os._exit(0)

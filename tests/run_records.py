"""Runs that are nothing but their records, written by hand."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_record
from tests.runs import bare_run

FAR = {"host": "far", "pid": 7, "started": 1.0}
GONE = {"host": socket.gethostname(), "pid": 1, "started": 1.0}
"""A process of this host that has ended."""


def recorded_run(
    path: Path,
    launch: Mapping[str, Any],
    outcome: Mapping[str, Any] | None = None,
    *,
    status: Mapping[str, Any] | None = None,
    began_s_ago: float = 60.0,
) -> tuple[RunDir, Attempt]:
    """A run with one attempt, and what its ranks say of themselves."""
    run_dir = bare_run(path)
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    begun = {"begun_at": time.time() - began_s_ago, "typed": "isles train x"}
    write_record(attempt.launch, {**begun, **launch})
    if outcome is not None:
        write_record(attempt.outcome, {"at": time.time(), "exit_code": 0, **outcome})
    if status is not None:
        write_record(run_dir.status, {"updated_at": time.time(), **status})
    return run_dir, attempt


def two_hosts(attempt: Attempt, launcher: str, first: str | None = None) -> None:
    """The hosts of an attempt, h0 with two ranks and h1 with one, and all their logs.

    `first`: h0 as ssh takes it; None: this machine sees all.
    """
    nodes = (FleetNode(0, "h0", first, "10.0.0.1", 2), FleetNode(1, "h1", None, "10.0.0.2", 1))
    Fleet(launcher, nodes, 29500, 2, "cuda", 60.0, "").write(attempt)
    for node in range(2):
        attempt.node_log(node).write_text(f"agent {node}\n")
    for rank in range(3):
        attempt.rank_log(rank).write_text(f"line of {rank}\n")


def rank_error(attempt: Attempt, rank: int, what: str, at: float = 1.0, **fields: Any) -> None:
    """The error that a rank has left."""
    record = {"rank": rank, "host": "far", "at": at, "exit_code": 3, "is_communication": False}
    write_record(attempt.rank_error(rank), {**record, "what": what, **fields})

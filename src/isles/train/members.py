"""The nodes that have met: who is missing, who is new, and what that means."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from isles.rundir.nodes import Meeting, living_nodes, node_process
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.records import read_record, write_record
from isles.rundir.restarts import (
    Restart,
    list_restarts,
    newest_step,
    read_last_step,
    read_restart,
    write_restart,
)
from isles.train.verdict import judge, trouble

_FIRST_LINE_S = 5.0
_LINE_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Members:
    """Those who have met.

    Args:
        nodes: the places of the nodes, in the order of their ranks.
        world_size: ranks on all of them.
    """

    nodes: tuple[int, ...]
    world_size: int

    @classmethod
    def of(cls, record: dict[str, Any]) -> Members:
        """From `members.json`."""
        return cls(tuple(int(node) for node in record["nodes"]), int(record["world_size"]))

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def judge_members(
    run_dir: RunDir,
    attempt: Attempt,
    before: Members,
    now: Members,
    number: int,
    max_restarts: int,
) -> Restart:
    """Why the nodes have met again. Only the first of them calls this.

    Args:
        run_dir: the run.
        attempt: this start of it.
        before: who was there until now.
        now: who has met.
        number: of the restart that follows.
        max_restarts: how often ranks that were lost are started again.
    """
    settled = read_restart(attempt, number)
    if settled is not None:
        return settled
    gone = [node for node in before.nodes if node not in now.nodes]
    come = [node for node in now.nodes if node not in before.nodes]
    reached = read_last_step(attempt, number - 1)
    if not gone and not come:
        errors = [read_record(path) for path in attempt.rank_errors(number - 1)]
        found = sorted((error for error in errors if error), key=lambda error: float(error["at"]))
        fix = "look at the logs of the ranks that are missing: `isles logs`"
        culprit = found[0] if found else trouble("the ranks have lost one another", fix)
        return judge(run_dir, attempt, number - 1, culprit, max_restarts=max_restarts)
    words = [f"{_names(attempt, gone)} {_is(gone)} gone"] if gone else []
    words += [f"{_names(attempt, come)} {_has(come)} come"] if come else []
    restart = Restart(
        number=number,
        at=time.time(),
        verdict="restart",
        culprit=None,
        why=" and ".join(words),
        reached=reached,
        saved=newest_step(run_dir),
        count=sum(entry.is_counted for entry in list_restarts(attempt)),
        max_restarts=max_restarts,
        is_counted=False,
    )
    return write_restart(attempt, restart)


def _names(attempt: Attempt, nodes: list[int]) -> str:
    words = []
    for node in nodes:
        process = node_process(attempt, node)
        words.append(
            f"node {node}" + (f" ({process.host}, agent {process.pid})" if process else "")
        )
    return ", ".join(words)


def _is(nodes: list[int]) -> str:
    return "is" if len(nodes) == 1 else "are"


def _has(nodes: list[int]) -> str:
    return "has" if len(nodes) == 1 else "have"


class Waiting:
    """While nodes wait for others, says for whom: in the log and in status.json."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, meeting: Meeting | None) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._meeting = meeting
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        if self._meeting is not None:
            threading.Thread(target=self._say_so, args=(self._meeting,), daemon=True).start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()

    def _say_so(self, meeting: Meeting) -> None:
        pause_s = _FIRST_LINE_S
        while not self._is_over.wait(pause_s):
            there = living_nodes(self._attempt, meeting.max_nodes)
            wanted = max(meeting.min_nodes, len(there))
            names = ", ".join(map(str, (n for n in range(meeting.max_nodes) if n not in there)))
            line = f"waiting for {wanted} nodes: {len(there)} of {meeting.max_nodes} are there"
            line += f", missing: {names}" if names else ""
            sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} agent: {line}\n")
            sys.stderr.flush()
            status = read_record(self._run_dir.status) or {}
            status |= {"phase": "waiting for nodes", "detail": line, "updated_at": time.time()}
            write_record(self._run_dir.status, status, durable=False)
            pause_s = _LINE_EVERY_S
